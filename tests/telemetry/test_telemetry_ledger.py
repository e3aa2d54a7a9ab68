"""Self-times and unaccounted time partition the wall clock, whatever is nested, skipped or broken."""

import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.telemetry.ledger import Ledger, MemorySample
from paceline.telemetry.records import read_ledger, summarise


class FakeClock:
    """Nanoseconds that pass only when told to."""

    def __init__(self):
        self.now = 1_000_000

    def __call__(self):
        return self.now


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.integers(0, 10**9)),
        st.tuples(st.just("open"), st.sampled_from(["rollout", "reward", "update_actor"])),
        st.tuples(st.just("close"), st.just(0)),
    ),
    max_size=60,
)


@given(ACTIONS)
def test_self_times_and_unaccounted_time_add_up_to_the_wall_clock(actions):
    clock = FakeClock()
    ledger = Ledger(clock_ns=clock)
    open_spans = []
    expected = {}
    with ledger.step(1):
        for action, value in actions:
            if action == "wait":
                clock.now += value
                owner = open_spans[-1].stage if open_spans else None
                expected[owner] = expected.get(owner, 0) + value
            elif action == "open":
                open_spans.append(ledger.span(value).__enter__())
            elif open_spans:
                open_spans.pop().__exit__(None, None, None)
        while open_spans:
            open_spans.pop().__exit__(None, None, None)
    totals = ledger.last_section
    assert totals.wall_s == pytest.approx(sum(expected.values()) / 1e9)
    assert totals.unaccounted_s == pytest.approx(expected.pop(None, 0) / 1e9)
    for stage, nanoseconds in expected.items():
        assert totals.stage_s[stage] == pytest.approx(nanoseconds / 1e9)
    assert sum(totals.stage_s.values()) + totals.unaccounted_s == pytest.approx(totals.wall_s)


def test_an_error_inside_a_step_still_closes_every_span_and_keeps_its_time(tmp_path):
    clock = FakeClock()
    ledger = Ledger(tmp_path / "ledger" / "rank0.jsonl", clock_ns=clock)
    with (
        pytest.raises(RuntimeError, match="boom"),
        ledger.step(1),
        ledger.span("rollout"),
        ledger.span("reward"),
    ):
        clock.now += 5
        raise RuntimeError("boom")
    ledger.close()
    (rank,) = read_ledger(tmp_path)
    (step,) = rank.steps()
    assert step.stages["reward"].self_s == 5e-9 and step.unaccounted_s == 0.0


def test_a_step_cannot_begin_inside_a_span():
    ledger = Ledger()
    with ledger.span("data"), pytest.raises(RuntimeError, match="still open"), ledger.step(1):
        pass


def test_an_absorbing_span_owns_what_is_opened_inside_it_under_its_own_name(tmp_path):
    clock = FakeClock()
    ledger = Ledger(tmp_path / "ledger" / "rank0.jsonl", clock_ns=clock)
    with ledger.span("eval", absorb=True):
        with ledger.span("rollout", "decode"):
            clock.now += 7
        clock.now += 2
    ledger.close()
    (rank,) = read_ledger(tmp_path)
    (section,) = rank.processes[0].sections
    assert section.stages.keys() == {"eval"}
    assert section.stages["eval"].self_s == pytest.approx(9e-9)
    assert [span.name for span in rank.processes[0].spans] == ["rollout decode", ""]


def test_counts_and_memory_of_spans_reach_their_stage(tmp_path):
    ledger = Ledger(tmp_path / "ledger" / "rank0.jsonl", sample_memory=lambda: MemorySample(3, 4, 5))
    with ledger.step(1), ledger.span("update_actor") as span:
        span.add(tokens=10, flops=1e9)
        span.add(tokens=5, num_bytes=8)
    ledger.close()
    stage = read_ledger(tmp_path)[0].steps()[0].stages["update_actor"]
    assert (stage.tokens, stage.flops, stage.bytes) == (15, 1e9, 8)
    assert (stage.peak_allocated, stage.peak_reserved, stage.host_rss) == (3, 4, 5)


def test_spans_beyond_the_bound_are_counted_and_their_time_kept(tmp_path):
    clock = FakeClock()
    ledger = Ledger(tmp_path / "ledger" / "rank0.jsonl", clock_ns=clock)
    with ledger.step(1):
        for _ in range(2_500):
            with ledger.span("rollout"):
                clock.now += 1
    ledger.close()
    (rank,) = read_ledger(tmp_path)
    (step,) = rank.steps()
    assert step.num_spans_not_kept == 500
    assert step.stages["rollout"].self_s == pytest.approx(2_500e-9)


def test_background_work_from_another_thread_owns_no_wall_time(tmp_path):
    clock = FakeClock()
    ledger = Ledger(tmp_path / "ledger" / "rank0.jsonl", clock_ns=clock)
    with ledger.step(1):
        thread = threading.Thread(
            target=ledger.background, args=("checkpoint", "write", clock.now, clock.now + 50)
        )
        thread.start()
        thread.join()
        clock.now += 10
    ledger.close()
    (rank,) = read_ledger(tmp_path)
    assert rank.processes[0].background[0].stage == "checkpoint"
    assert rank.steps()[0].unaccounted_s == pytest.approx(10e-9)


def test_a_resumed_run_appends_and_a_step_done_again_counts_once(tmp_path):
    path = tmp_path / "ledger" / "rank0.jsonl"
    for seconds, steps in ((1, (1, 2)), (3, (2, 3))):
        clock = FakeClock()
        ledger = Ledger(path, clock_ns=clock)
        for step in steps:
            with ledger.step(step), ledger.span("rollout"):
                clock.now += seconds * 10**9
        ledger.close()
    with path.open("a") as file:
        file.write('{"v": 1, "kind": "sp')  # killed in the middle of a line
    (rank,) = read_ledger(tmp_path)
    assert [step.wall_s for step in rank.steps()] == pytest.approx([1.0, 3.0, 3.0])
    assert rank.num_torn_lines == 1
    figures = summarise(rank)
    assert figures["step_time_s"] == pytest.approx(7 / 3)
    assert figures["accounted_fraction"] == 1.0
    assert json.dumps(figures)
