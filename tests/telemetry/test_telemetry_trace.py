"""A trace shows every recorded span at its place, on tracks on which nothing overlaps."""

import json

import pytest

from paceline.cli import main
from paceline.telemetry.causes.records import StepCauses, append_causes, causes_path
from paceline.telemetry.device.records import (
    DeviceFigures,
    DeviceSample,
    HostFigures,
    device_path,
    sample_line,
)
from paceline.telemetry.ledger import Ledger, MemorySample
from paceline.telemetry.records import read_ledger
from paceline.telemetry.trace import trace_events, write_trace
from paceline.types import CAUSES

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


PHASES = {"X": ("ts", "dur", "tid"), "C": ("ts", "args"), "M": ("args",)}


def format_problems(trace):
    """What of a trace breaks the Trace Event Format, as its document states it for the phases we write."""
    problems = []
    for event in trace["traceEvents"]:
        phase = event.get("ph")
        if phase not in PHASES:
            problems.append(f"phase {phase}")
            continue
        missing = [key for key in ("name", "pid", *PHASES[phase]) if key not in event]
        numbers = [event[key] for key in ("ts", "dur") if key in event]
        if missing or not isinstance(event["name"], str) or not isinstance(event["pid"], int):
            problems.append(f"{event}: lacks {missing}")
        if any(isinstance(n, bool) or not isinstance(n, int | float) or n < 0 for n in numbers):
            problems.append(f"{event}: times are numbers from 0")
        if phase == "C" and not all(isinstance(value, int | float) for value in event["args"].values()):
            problems.append(f"{event}: a counter's values are numbers")
        if phase == "M" and event["name"] not in ("process_name", "thread_name", "thread_sort_index"):
            problems.append(f"{event}: unknown metadata")
    return problems or nesting_problems(trace)


def nesting_problems(trace):
    """Complete events of one thread must nest: Perfetto drops what begins in an open one and ends after it."""
    problems, threads = [], {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for events in threads.values():
        ends = []
        for event in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
            while ends and ends[-1] <= event["ts"] + 1e-6:
                ends.pop()
            if ends and event["ts"] + event["dur"] > ends[-1] + 1e-3:
                problems.append(f"{event['name']} ends after the one around it")
            ends.append(event["ts"] + event["dur"])
    return problems


def with_causes_and_samples(run_dir):
    """Two ranks with a profiled step each, and samples of a device."""
    for rank in (0, 1):
        record(run_dir, rank)
        cells = {"rollout": dict.fromkeys(CAUSES, 0.0) | {"compute": 1.5, "scheduling": 0.5}}
        append_causes(causes_path(run_dir, rank), StepCauses(1, cells))
        path = device_path(run_dir, rank)
        path.parent.mkdir(exist_ok=True)
        unix_s = read_ledger(run_dir)[rank].processes[0].unix_s + 2.0
        figures = DeviceFigures(utilization=0.5, sm_activity=0.25, power_w=300.0, memory_used=2**30)
        host = HostFigures(1.0, 2.0, 4.0, 8, 100, 50, 1000, 2)
        path.write_text(json.dumps(sample_line(DeviceSample(unix_s, host, figures))) + "\n")


def test_a_trace_with_everything_in_it_keeps_the_format(tmp_path):
    with_causes_and_samples(tmp_path)
    trace = json.loads(write_trace(tmp_path).read_text())
    assert format_problems(trace) == []
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}


@pytest.mark.parametrize(
    "event",
    [
        {"ph": "B", "name": "x", "pid": 0, "tid": 0, "ts": 1.0},
        {"ph": "X", "name": "x", "pid": 0, "tid": 1, "ts": -1.0, "dur": 1.0},
        {"ph": "X", "name": "x", "pid": 0, "tid": 1, "ts": 1.0},
        {"ph": "X", "name": "x", "pid": 0, "tid": 1, "ts": 2e6, "dur": 5e6},
        {"ph": "C", "name": "x", "pid": 0, "ts": 1.0, "args": {"a": None}},
    ],
)
def test_the_format_check_finds_what_breaks_it(event, tmp_path):
    record(tmp_path)
    trace = json.loads(write_trace(tmp_path).read_text())
    trace["traceEvents"].append(event)
    assert format_problems(trace)


def test_causes_stand_on_their_step_and_as_counters(tmp_path):
    with_causes_and_samples(tmp_path)
    trace = json.loads(write_trace(tmp_path).read_text())
    steps = complete(trace, "step 1")
    assert [step["args"]["causes_s"] for step in steps] == [
        {"rollout": {"compute": 1.5, "scheduling": 0.5}}
    ] * 2
    counters = [e for e in trace["traceEvents"] if e["name"].startswith("causes") and e["pid"] == 1]
    begin, end = steps[1]["ts"], steps[1]["ts"] + steps[1]["dur"]
    assert [(c["ts"], c["args"]["compute"]) for c in counters] == [
        (pytest.approx(begin), 1.5),
        (pytest.approx(end), 0.0),
    ]


def test_device_samples_are_counters_at_their_time(tmp_path):
    with_causes_and_samples(tmp_path)
    trace = json.loads(write_trace(tmp_path).read_text())
    found = {e["name"]: e for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == 0}
    assert found["device activity, %"]["args"] == {"kernel running": 50.0, "SM": 25.0}
    assert found["device memory, GiB"]["args"] == {"used": 1.0}
    assert found["host CPU, cores"]["ts"] == pytest.approx(2e6, abs=1e5)
    assert "device clocks, MHz" not in found


def test_the_command_writes_where_it_says(tmp_path, capsys):
    record(tmp_path)
    assert main(["trace", str(tmp_path), "--out", str(tmp_path / "t.json")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "t.json")
    assert format_problems(json.loads((tmp_path / "t.json").read_text())) == []


def test_the_command_refuses_a_folder_without_a_ledger(tmp_path, capsys):
    assert main(["trace", str(tmp_path)]) == 2
    assert "holds no ledger" in capsys.readouterr().err
