"""Alarms: none of a healthy run, one per planted fault, and gone again once the fault is long past."""

import math
import os
from pathlib import Path

import pytest
from monitor_runs import GrowingRun

from paceline.monitor.alarms import MIN_SILENCE_S, WINDOW, alarms_of
from paceline.monitor.following import follow

FAULTS = {
    "not_finite": {"loss__total": math.nan},
    "updates_skipped": {"updates__skipped": 1},
    "out_of_memory": {"memory__out_of_memory_retries": 2},
    "reward_failures": {"reward__errors": 3},
    "no_signal": {"reward__std": 0.0},
    "exhausted": {"rollout__exhausted": 1},
    "overlong": {"samples__overlong": 1},
    "checkpoint_waits": {"checkpoint__waits": 1},
    "truncated": {"truncated_fraction": 0.9},
    "mfu": {"mfu__update_actor": 1.4},
    "slower": {"time__step": 2.0},
    "unequal_ranks": {"balance__busy_max_over_mean": 1.7},
    "logprobs_apart": {"rollout__logprob_difference_mean": 0.5},
    "entropy_collapse": {"entropy": 0.01},
    "host_memory": {"memory__host_rss": 9 * 2**30},
    "unaccounted": {"time__unaccounted": 0.3},
}


def names(run: GrowingRun) -> list[str]:
    return [alarm.name for alarm in alarms_of(follow(run.run_dir))]


def test_a_healthy_run_has_none(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "r")
    run.steps(1, 20)
    run.summary("running")
    assert names(run) == []


def test_a_run_without_a_step_has_none(tmp_path: Path) -> None:
    assert names(GrowingRun(tmp_path / "r")) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_and_nothing_else(tmp_path: Path, fault: str) -> None:
    run = GrowingRun(tmp_path / "r")
    run.steps(1, 12)
    run.steps(13, 12 + WINDOW, **FAULTS[fault])
    assert names(run) == [fault]


@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in ("host_memory", "slower")])
def test_an_alarm_goes_when_its_cause_is_long_past(tmp_path: Path, fault: str) -> None:
    run = GrowingRun(tmp_path / "r")
    run.steps(1, WINDOW, **FAULTS[fault])
    run.steps(WINDOW + 1, 2 * WINDOW)
    assert names(run) == []


def test_a_run_that_records_nothing_any_more_is_silent(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "r")
    run.steps(1, 3)
    run.summary("running")
    for path in run.run_dir.rglob("*.jsonl"):
        os.utime(path, (path.stat().st_mtime - 2 * MIN_SILENCE_S,) * 2)
    assert names(run) == ["silent"]
    run.summary("completed")
    assert names(run) == []


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "r")
    run.summary("failed", "OutOfMemoryError: 3 GiB")
    (alarm,) = alarms_of(follow(run.run_dir))
    assert alarm.text == "OutOfMemoryError: 3 GiB"


def test_what_a_log_leaves_out_is_no_alarm_of_an_imported_run(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "r")
    run.steps(1, 9, time__unaccounted=1.0)
    run.summary("imported")
    assert names(run) == []
