"""Self-times and unaccounted time partition the wall clock, whatever is nested, skipped or broken."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.telemetry.ledger import Ledger, MemorySample
from paceline.telemetry.records import read_ledger, summarise
from paceline.types import STAGES


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
    assert totals.wall_ns == sum(expected.values())
    assert totals.unaccounted_ns == expected.pop(None, 0)
    assert {stage: ns for stage, ns in totals.stage_ns.items() if ns} == {
        s: ns for s, ns in expected.items() if ns
    }
    assert sum(totals.stage_ns.values()) + totals.unaccounted_ns == totals.wall_ns


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


def test_counts_given_before_and_added_inside_reach_their_stage(tmp_path):
    ledger = Ledger(tmp_path / "ledger" / "rank0.jsonl", sample_memory=lambda: MemorySample(3, 4, 5))
    with ledger.step(1), ledger.span("update_actor", tokens=4, flops=5e8, num_bytes=3) as span:
        span.add(tokens=6, flops=5e8)
        span.add(tokens=5, num_bytes=5)
    ledger.close()
    (rank,) = read_ledger(tmp_path)
    stage = rank.steps()[0].stages["update_actor"]
    assert (stage.tokens, stage.flops, stage.bytes) == (15, 1e9, 8)
    assert (stage.peak_allocated, stage.peak_reserved, stage.host_rss) == (3, 4, 5)
    (span,) = rank.processes[0].spans
    assert (span.tokens, span.flops, span.bytes) == (15, 1e9, 8)


def test_adding_to_a_closed_span_is_refused():
    with Ledger().span("data") as span:
        pass
    with pytest.raises(RuntimeError, match="closed"):
        span.add(tokens=1)


def many_spans(tmp_path, num_decodes):
    clock = FakeClock()
    ledger = Ledger(tmp_path / "ledger" / "rank0.jsonl", clock_ns=clock)
    with ledger.step(1):
        with ledger.span("rollout"):
            for _ in range(num_decodes):
                with ledger.span("rollout", "decode"):
                    clock.now += 1
        with (
            ledger.span("update_actor"),
            ledger.span("update_actor", "forward"),
            ledger.span("reward", "deep"),
        ):
            clock.now += 1
    ledger.close()
    (rank,) = read_ledger(tmp_path)
    return rank


def test_many_spans_of_one_name_crowd_no_other_out_of_the_timeline(tmp_path):
    rank = many_spans(tmp_path, 2_500)
    kept = Counter((span.stage, span.name, span.depth) for span in rank.processes[0].spans)
    assert kept == {
        ("rollout", "decode", 1): 2_000,
        ("rollout", "", 0): 1,
        ("reward", "deep", 2): 1,
        ("update_actor", "forward", 1): 1,
        ("update_actor", "", 0): 1,
    }


def test_spans_beyond_the_bound_are_counted_and_their_time_kept(tmp_path):
    (step,) = many_spans(tmp_path, 12_500).steps()
    assert (step.num_spans, step.num_spans_not_kept) == (12_504, 10_500)
    assert step.stages["rollout"].count == 12_501
    assert step.stages["rollout"].self_s == pytest.approx(12_500e-9)
    assert step.unaccounted_s == 0.0


def test_names_without_end_crowd_no_outer_span_out_and_are_bounded(tmp_path):
    ledger = Ledger(tmp_path / "ledger" / "rank0.jsonl")
    with ledger.step(1), ledger.span("rollout"):
        for index in range(10_500):
            with ledger.span("rollout", f"request {index}"):
                pass
    ledger.close()
    (rank,) = read_ledger(tmp_path)
    spans = rank.processes[0].spans
    assert len(spans) == 10_001 and spans[-1].depth == 0
    assert rank.steps()[0].num_spans_not_kept == 500


@pytest.mark.parametrize(
    "wrong,nearest", [("rolout", "rollout"), ("update", "update_actor"), ("Sync", "sync")]
)
def test_an_unknown_stage_is_refused_with_the_nearest_known_one(wrong, nearest):
    ledger = Ledger()
    with pytest.raises(ValueError, match=f"'{wrong}'.*nearest: '{nearest}'"):
        ledger.span(wrong)
    with ledger.step(1), pytest.raises(ValueError, match=f"'{wrong}'.*nearest: '{nearest}'"):
        ledger.span(wrong)
    with pytest.raises(ValueError, match=f"'{wrong}'.*nearest: '{nearest}'"):
        ledger.background(wrong, "write", 0, 1)


def test_an_unknown_stage_inside_an_absorbing_span_is_refused_too():
    ledger = Ledger()
    with ledger.span("eval", absorb=True), pytest.raises(ValueError, match="rolout"):
        ledger.span("rolout")


def test_set_up_is_a_stage_outside_steps_only():
    ledger = Ledger()
    with ledger.span("setup"):
        pass
    with ledger.step(3), pytest.raises(ValueError, match="'setup' is for time outside steps, and step 3"):
        ledger.span("setup")


def test_every_stage_may_occur_outside_steps_too():
    ledger = Ledger()
    for stage in STAGES:
        with ledger.span(stage):
            pass


def from_another_thread(call):
    caught = []

    def run():
        try:
            call()
        except RuntimeError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return caught


def test_a_span_from_another_thread_is_refused_and_spoils_nothing(tmp_path):
    ledger = Ledger()
    with ledger.step(1), ledger.span("rollout"):
        (error,) = from_another_thread(lambda: ledger.span("reward").__enter__())
        assert "Ledger.background" in str(error)
    assert ledger.last_section.stage_ns.keys() == {"rollout"}


def test_a_step_or_the_end_from_another_thread_is_refused():
    ledger = Ledger()
    assert from_another_thread(lambda: ledger.step(1).__enter__())
    assert from_another_thread(ledger.close)
    ledger.close()


def test_a_span_is_opened_once():
    span = Ledger().span("data")
    with span:
        pass
    with pytest.raises(RuntimeError, match="before"), span:
        pass


def test_the_error_of_a_step_is_raised_as_it_was_where_it_left_a_span_open(tmp_path):
    clock = FakeClock()
    ledger = Ledger(tmp_path / "ledger" / "rank0.jsonl", clock_ns=clock)
    with pytest.raises(KeyError, match="boom") as raised, ledger.step(1):
        ledger.span("rollout").__enter__()
        ledger.span("rollout", "decode").__enter__()
        clock.now += 5
        raise KeyError("boom")
    assert raised.value.__notes__ == [
        "open in the ledger when this was raised, and ended there: span rollout, span rollout/decode"
    ]
    assert raised.value.__context__ is None
    ledger.close()
    (step,) = read_ledger(tmp_path)[0].steps()
    assert (step.num_spans, step.stages["rollout"].self_s, step.unaccounted_s) == (2, 5e-9, 0.0)


def test_an_error_passes_through_an_outer_span_whose_inner_one_was_left_open():
    ledger = Ledger()
    with pytest.raises(KeyError) as raised, ledger.step(1), ledger.span("rollout"):
        ledger.span("reward").__enter__()
        raise KeyError("boom")
    assert "span reward" in raised.value.__notes__[0]
    assert ledger.last_section.stage_ns.keys() == {"rollout", "reward"}


def test_a_generator_that_an_error_cut_off_may_close_its_span_afterwards():
    ledger = Ledger()

    def decoding():
        with ledger.span("rollout", "decode"):
            yield
            yield

    generator = decoding()
    with pytest.raises(KeyError), ledger.step(1):
        next(generator)
        raise KeyError("boom")
    generator.close()
    with ledger.step(2), ledger.span("data"):
        pass
    assert ledger.last_section.stage_ns.keys() == {"data"}


def test_a_span_left_open_where_a_step_ends_is_an_error_after_which_the_ledger_works():
    ledger = Ledger()
    with pytest.raises(RuntimeError, match="span data is still open where step 1 ends"), ledger.step(1):
        ledger.span("data").__enter__()
    with ledger.step(2):
        pass
    assert ledger.last_section.step == 2
    ledger.close()


def test_spans_closed_out_of_order_are_refused():
    ledger = Ledger()
    outer = ledger.span("rollout").__enter__()
    ledger.span("reward").__enter__()
    with pytest.raises(RuntimeError, match="inner spans close first"):
        outer.__exit__(None, None, None)


def test_closing_the_ledger_on_the_way_out_of_an_error_does_not_replace_it(tmp_path):
    ledger = Ledger(tmp_path / "ledger" / "rank0.jsonl")
    with pytest.raises(KeyError, match="boom"), ExitStack() as stack:
        stack.callback(ledger.close)
        ledger.span("setup").__enter__()
        raise KeyError("boom")
    assert read_ledger(tmp_path)[0].processes[0].spans[0].stage == "setup"


def test_a_step_cannot_begin_inside_another():
    ledger = Ledger()
    with ledger.step(1), pytest.raises(RuntimeError, match="step 2 begins inside step 1"), ledger.step(2):
        pass
    assert ledger.last_section.step == 1


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


def write_steps(path, steps, seconds=1):
    clock = FakeClock()
    ledger = Ledger(path, clock_ns=clock)
    for step in steps:
        with ledger.step(step), ledger.span("rollout"):
            clock.now += seconds * 10**9
    ledger.close()


def test_steps_beyond_the_point_of_a_resume_are_gone_also_when_the_resumed_run_is_killed_early(tmp_path):
    path = tmp_path / "ledger" / "rank0.jsonl"
    write_steps(path, range(1, 10))
    write_steps(path, range(7, 8), seconds=2)  # resumed after step 6, killed after 7
    (rank,) = read_ledger(tmp_path)
    assert [(step.step, step.wall_s) for step in rank.steps()] == [(n, 1.0) for n in range(1, 7)] + [(7, 2.0)]
    assert len(rank.processes[0].sections) == 2 * 9 + 1  # nothing is truncated


@pytest.mark.parametrize("seconds,median", [([1, 2], 1.5), ([1, 9, 2, 4], 3.0), ([5, 1, 2], 2.0)])
def test_the_median_step_of_an_even_number_is_between_the_middle_two(tmp_path, seconds, median):
    clock = FakeClock()
    ledger = Ledger(tmp_path / "ledger" / "rank0.jsonl", clock_ns=clock)
    for step, duration in enumerate(seconds, start=1):
        with ledger.step(step):
            clock.now += duration * 10**9
    ledger.close()
    assert summarise(read_ledger(tmp_path)[0])["step_time_median_s"] == pytest.approx(median)


@pytest.mark.parametrize("left", [0, 10, 40])
def test_a_ledger_whose_run_line_is_torn_is_read_all_the_same(tmp_path, left):
    path = tmp_path / "ledger" / "rank0.jsonl"
    write_steps(path, (1, 2))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0][:left] + "\n", *lines[1:]]))
    (rank,) = read_ledger(tmp_path)
    assert [step.step for step in rank.steps()] == [1, 2]
    assert rank.num_torn_lines == 1
    assert [process.is_start_estimated for process in rank.processes] == [True]


def test_a_process_whose_run_line_is_torn_is_not_taken_for_the_one_before(tmp_path):
    path = tmp_path / "ledger" / "rank0.jsonl"
    write_steps(path, (1, 2))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, '{"v": 1, "ki\n', *lines[1:]]))
    (rank,) = read_ledger(tmp_path)
    first, second = rank.processes
    assert (first.is_start_estimated, second.is_start_estimated) == (False, True)
    assert second.unix_s == pytest.approx(first.unix_s + 2.0, abs=1e-3)
    assert [len(process.sections) for process in rank.processes] == [5, 5]


def test_a_leading_process_of_unknown_start_is_put_before_the_one_after(tmp_path):
    path = tmp_path / "ledger" / "rank0.jsonl"
    write_steps(path, (1, 2))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(["\n", *lines[1:], *lines]))
    first, second = read_ledger(tmp_path)[0].processes
    assert first.unix_s == pytest.approx(second.unix_s - 2.0, abs=1e-3)


def test_a_record_of_an_unknown_kind_is_refused(tmp_path):
    path = tmp_path / "ledger" / "rank0.jsonl"
    write_steps(path, (1,))
    with path.open("a") as file:
        file.write('{"v": 1, "kind": "spam", "start_s": 9.0}\n')
    with pytest.raises(ValueError, match="spam"):
        read_ledger(tmp_path)


def test_a_line_torn_by_a_kill_is_ended_before_the_next_process_writes(tmp_path):
    path = tmp_path / "ledger" / "rank0.jsonl"
    write_steps(path, (1,))
    with path.open("a") as file:
        file.write('{"v": 1, "kind": "sp')
    write_steps(path, (2,))
    (rank,) = read_ledger(tmp_path)
    assert (len(rank.processes), rank.num_torn_lines, len(rank.steps())) == (2, 1, 2)


PROGRAM = """
import pathlib, sys, time
time.sleep(0.3)
from paceline.telemetry.ledger import Ledger
for name in sys.argv[1:]:
    Ledger(pathlib.Path(name) / "ledger" / "rank0.jsonl", since_process_start=True).close()
"""


def test_the_wall_clock_of_a_run_starts_with_its_process_and_is_counted_once(tmp_path):
    began = time.time()
    folders = [tmp_path / "first", tmp_path / "second"]
    subprocess.run([sys.executable, "-c", PROGRAM, *map(str, folders)], check=True)
    took = time.time() - began
    first, second = (read_ledger(folder)[0].processes[0] for folder in folders)
    assert began - 0.05 < first.unix_s < began + took - 0.25
    (section,) = first.sections
    assert 0.3 <= section.stages["setup"].self_s < took + 0.05
    assert section.wall_s == pytest.approx(section.stages["setup"].self_s, abs=0.05)
    assert [(span.stage, span.name) for span in first.spans] == [("setup", "start")]
    assert second.spans == [] and second.sections[0].wall_s < 0.1
