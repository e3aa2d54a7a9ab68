"""Timelines lose no time: gaps show, short neighbours are drawn together, and bars stay few."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import Clock, RunWriter

from paceline.report.palette import UNACCOUNTED
from paceline.report.run_data import load_run
from paceline.report.timeline_bars import gaps, median_step, merged
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.records import SpanRecord, read_ledger


def span(start_s, end_s, stage="rollout", depth=0):
    return SpanRecord(1, stage, "", depth, start_s, end_s, end_s - start_s)


def test_time_that_no_span_covers_becomes_bars_that_sum_to_the_unaccounted_time(tmp_path):
    ledger = load_run(RunWriter(tmp_path / "run", num_steps=3).write_all()).main_ledger
    section, process = median_step(ledger)
    spans = [s for s in process.spans if s.step == section.step]
    found = gaps(section, spans, shortest_s=0.0)
    assert {bar.stage for bar in found} <= {UNACCOUNTED}
    assert sum(bar.busy_s for bar in found) == pytest.approx(section.unaccounted_s)


def test_no_gap_is_drawn_where_spans_were_not_kept(tmp_path):
    clock = Clock()
    ledger = Ledger(tmp_path / "ledger" / "rank0.jsonl", clock_ns=clock)
    with ledger.step(1), ledger.span("rollout"):
        for _ in range(3000):
            with ledger.span("rollout", "decode"):
                clock.wait(0.001)
    ledger.close()
    section, process = median_step(read_ledger(tmp_path)[0])
    assert section.num_spans_not_kept > 0
    assert gaps(section, process.spans, shortest_s=0.0) == []


def test_short_neighbours_become_one_bar_in_the_colour_of_most_of_their_time():
    spans = [span(0.0, 1.0), span(1.0, 1.001, "reward"), span(1.001, 1.004, "data"), span(1.004, 2.0)]
    bars = merged(spans, resolution_s=0.01)
    assert [(bar.stage, bar.num_spans) for bar in bars] == [("rollout", 1), ("data", 2), ("rollout", 1)]
    assert bars[1].busy_s == pytest.approx(0.004)


@given(st.lists(st.tuples(st.floats(0, 0.01), st.floats(0, 0.01)), min_size=1, max_size=300))
def test_merging_loses_no_span_and_no_time(lengths):
    spans, now = [], 0.0
    for gap, duration in lengths:
        spans.append(span(now + gap, now + gap + duration))
        now += gap + duration
    bars = merged(spans, resolution_s=0.002)
    assert sum(bar.num_spans for bar in bars) == len(spans)
    assert sum(bar.busy_s for bar in bars) == pytest.approx(sum(s.end_s - s.start_s for s in spans))
    assert all(earlier.end_s <= later.start_s + 1e-9 for earlier, later in pairwise(bars))


def test_the_median_step_is_taken_from_the_process_that_counts(tmp_path):
    writer = RunWriter(tmp_path / "resumed", num_steps=3)
    writer.write_process(range(1, 3))
    writer.write_process(range(1, 4))
    ledger = load_run(tmp_path / "resumed").main_ledger
    section, process = median_step(ledger)
    assert process is ledger.processes[1]
    assert section in process.sections
