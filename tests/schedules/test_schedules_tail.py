"""Tail figures: finish-time quantiles, and what the last samples of a rollout cost."""

import pytest
from tiny_runs import tiny_sections

from paceline.config import load_config
from paceline.schedules import run_training
from paceline.schedules.tail import tail_figures
from paceline.telemetry.metrics import read_metrics


def test_one_long_sample_keeps_the_other_slots_idle():
    figures = tail_figures([1.0] * 19 + [11.0], max_running=64)
    assert (figures.p50_s, figures.p90_s, figures.p99_s, figures.last_s) == (1.0, 1.0, 11.0, 11.0)
    assert figures.num_last == 1 and figures.tail_s == 10.0
    assert figures.idle_s == pytest.approx(10.0 * 19 / 20)


def test_idle_time_is_counted_against_the_slots_there_are():
    times = [*range(1, 39), 48, 58]  # the last two of forty: both until 48, one until 58
    figures = tail_figures(times, max_running=4)
    assert figures.num_last == 2 and figures.tail_s == 20
    assert figures.idle_s == pytest.approx(10 * (1 - 2 / 4) + 10 * (1 - 1 / 4))


def test_equal_samples_have_no_tail_and_one_sample_alone_leaves_nothing_idle():
    assert tail_figures([3.0] * 100, 100).idle_s == 0.0
    alone = tail_figures([5.0], 8)
    assert (alone.tail_s, alone.idle_s) == (5.0, 0.0)
    assert tail_figures([], 8) is None


def test_the_order_of_finish_times_changes_nothing():
    assert tail_figures([3.0, 1.0, 2.0], 2) == tail_figures([1.0, 2.0, 3.0], 2)


def test_a_run_records_its_tail(tmp_path):
    config = load_config(sections=tiny_sections(tmp_path, run={"num_steps": 2}, task={"eval_size": 0}))
    for record in read_metrics(run_training(config).run_dir):
        found = record.metrics
        assert (
            0
            < found["rollout/finish_p50_s"]
            <= found["rollout/finish_p90_s"]
            <= found["rollout/finish_last_s"]
        )
        assert 0 <= found["rollout/tail_idle_s"] <= found["rollout/tail_s"] <= found["rollout/finish_last_s"]
