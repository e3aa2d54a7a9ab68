"""A trace shows every recorded span at its place, on tracks on which nothing overlaps."""

import json

import pytest

from paceline.telemetry.ledger import Ledger, MemorySample
from paceline.telemetry.records import read_ledger
from paceline.telemetry.trace import trace_events, write_trace

SECOND = 10**9


class Clock:
    def __init__(self, start=0):
        self.now = start

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += int(seconds * SECOND)


def record(run_dir, rank=0):
    clock = Clock(5 * SECOND)
    memory = MemorySample(peak_allocated=1000, peak_reserved=2000, host_rss=3000)
    ledger = Ledger(run_dir / "ledger" / f"rank{rank}.jsonl", rank, clock, lambda: memory)
    clock.wait(1)
    with ledger.step(1):
        with ledger.span("rollout") as span:
            clock.wait(2)
            span.add(tokens=40, flops=1e9)
            with ledger.span("reward", "wait", cause="queue"):
                clock.wait(1)
        clock.wait(0.5)
    for start, end in ((6, 8), (7, 9), (8, 9)):
        ledger.background("checkpoint", "write", start * SECOND, end * SECOND)
    ledger.close()


def complete(trace, name):
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["name"] == name]


@pytest.fixture
def trace(tmp_path):
    record(tmp_path)
    return json.loads(write_trace(tmp_path).read_text())


def test_spans_lie_where_they_were_in_microseconds(trace):
    (rollout,) = complete(trace, "rollout")
    assert (rollout["ts"], rollout["dur"]) == pytest.approx((1e6, 3e6))
    assert rollout["args"] == {"step": 1, "self_s": 2.0, "tokens": 40, "flops": 1e9}
    (wait,) = complete(trace, "reward: wait")
    assert (wait["ts"], wait["dur"], wait["args"]["cause"]) == pytest.approx((3e6, 1e6, "queue"))


def test_a_step_shows_its_unaccounted_time(trace):
    (step,) = complete(trace, "step 1")
    assert step["dur"] == pytest.approx(3.5e6)
    assert step["args"]["unaccounted_s"] == pytest.approx(0.5)


def test_memory_is_a_counter(trace):
    counters = {e["name"]: e["args"] for e in trace["traceEvents"] if e["ph"] == "C"}
    assert counters["device memory peak"] == {"allocated": 1000, "reserved": 2000}
    assert counters["host memory"] == {"rss": 3000}


def test_slices_of_one_track_nest_or_follow_one_another(trace):
    tracks = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            tracks.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    assert len(tracks) == 4  # sections, spans, and two tracks for three pieces of background work
    for slices in tracks.values():
        for first in slices:
            for second in slices:
                assert second[0] >= first[1] or second[1] <= first[0] or nested(first, second)


def nested(first, second):
    return (first[0] <= second[0] and second[1] <= first[1]) or (
        second[0] <= first[0] and first[1] <= second[1]
    )


def test_a_rank_is_a_process_with_named_tracks(tmp_path):
    record(tmp_path, 0)
    record(tmp_path, 1)
    trace = trace_events(read_ledger(tmp_path))
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    tracks = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name" and e["pid"] == 1]
    assert tracks == ["steps", "spans", "background 1", "background 2"]


def test_the_process_of_a_resumed_run_lies_behind_the_one_before(tmp_path):
    record(tmp_path)
    path = tmp_path / "ledger" / "rank0.jsonl"
    lines = path.read_text().splitlines()
    again = [json.loads(line) for line in lines]
    again[0]["unix_s"] += 60
    path.write_text("\n".join(lines + [json.dumps(line) for line in again]) + "\n")
    first, second = complete(trace_events(read_ledger(tmp_path)), "rollout")
    assert second["ts"] - first["ts"] == pytest.approx(60e6, abs=1)


def test_a_run_without_a_ledger_has_no_trace(tmp_path):
    with pytest.raises(FileNotFoundError, match="ledger"):
        write_trace(tmp_path)
