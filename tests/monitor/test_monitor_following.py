"""A run's files are followed while they grow: torn lines, resumes, rotation, and how the run stands."""

import json
from pathlib import Path

import pytest
from monitor_runs import STAGES, GrowingRun

from paceline.config import ConfigError
from paceline.monitor.following import RECENT_STEPS, RunFollower, follow
from paceline.monitor.tailing import JsonlTail
from paceline.telemetry.metrics import read_metric_history
from paceline.telemetry.records import read_ledger


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_line_is_read_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    tail = JsonlTail(path)
    assert tail.read().records == []
    append(path, '{"a": 1}\n{"a": ')
    assert tail.read().records == [{"a": 1}]
    assert tail.read().records == []
    append(path, "2}\n")
    assert tail.read().records == [{"a": 2}]


def test_half_written_lines_are_counted_and_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append(path, '{"a": 1}\n{"a": \n{"a": 3}\n[]\n')
    new = JsonlTail(path).read()
    assert new.records == [{"a": 1}, {"a": 3}]
    assert new.num_torn == 2


def test_lines_nobody_wants_are_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append(path, '{"kind": "span", broken\n{"kind": "section"}\n')
    new = JsonlTail(path, skip=b'"kind": "span"').read()
    assert new.records == [{"kind": "section"}]
    assert new.num_torn == 0


@pytest.mark.parametrize("how", ["shorter", "same start, shorter", "longer", "other file"])
def test_a_file_that_was_replaced_is_read_from_its_start(tmp_path: Path, how: str) -> None:
    path = tmp_path / "x.jsonl"
    append(path, '{"a": 1}\n{"a": 2}\n')
    tail = JsonlTail(path)
    tail.read()
    contents = {
        "shorter": '{"b": 7}\n',
        "same start, shorter": '{"a": 1}\n',
        "longer": '{"b": 7}\n{"b": 8}\n{"b": 9}\n',
        "other file": '{"a": 1}\n{"a": 2}\n{"a": 3}\n',
    }
    if how == "other file":
        aside = tmp_path / "aside"
        aside.write_text(contents[how])
        aside.replace(path)
    else:
        path.write_text(contents[how])
    new = tail.read()
    assert new.was_replaced
    assert new.records == [json.loads(line) for line in contents[how].splitlines()]


def test_a_file_that_went_away_and_came_back_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    append(path, '{"a": 1}\n')
    tail = JsonlTail(path)
    tail.read()
    path.unlink()
    assert tail.read().was_replaced
    append(path, '{"a": 1}\n')
    assert tail.read().records == [{"a": 1}]


def test_following_step_by_step_ends_where_reading_everything_does(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "r")
    follower = RunFollower(run.run_dir)
    for step in range(1, 6):
        run.step(step, reward__mean=step / 10)
        assert follower.poll()
        assert not follower.poll()
    run.process()  # resumed after step 3
    for step in (4, 5, 6):
        run.step(step, reward__mean=step / 5)
        follower.poll()
    history = read_metric_history(run.run_dir)
    assert follower.records == list(history.records)
    for ledger in read_ledger(run.run_dir):
        seen = follower.ranks[ledger.rank].recent
        assert [(step.step, step.wall_s) for step in seen] == [(s.step, s.wall_s) for s in ledger.steps()]


def test_sums_hold_the_work_done_again_and_recent_steps_do_not(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "r", num_ranks=1)
    run.steps(1, 3)
    run.process()
    run.steps(2, 4)
    follower = follow(run.run_dir)
    assert [record.step for record in follower.records] == [1, 2, 3, 4]
    assert follower.metric_totals["tokens/response"] == 600
    totals = follower.ranks[0].totals
    assert totals.num_steps == 6
    assert totals.stage_s == pytest.approx({stage: 6 * seconds for stage, seconds in STAGES.items()})
    assert len(follower.ranks[0].recent) == 4


def test_a_rotated_log_goes_on_where_it_left(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "r")
    run.steps(1, 3)
    follower = follow(run.run_dir)
    run.log.close()
    (run.run_dir / "metrics.jsonl").rename(run.run_dir / "metrics.jsonl.1")
    run.process()
    run.steps(4, 5)
    follower.poll()
    assert [record.step for record in follower.records] == [1, 2, 3, 4, 5]


def test_few_steps_of_a_long_run_are_kept(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "r", num_ranks=1)
    run.steps(1, RECENT_STEPS + 5)
    assert follow(run.run_dir).ranks[0].recent[0].step == 6


def test_ranks_that_come_later_are_found(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "r", num_ranks=1)
    follower = follow(run.run_dir)
    assert list(follower.ranks) == [0]
    run.num_ranks = 12
    run.process()
    follower.poll()
    assert list(follower.ranks) == list(range(12))


def test_a_run_starts_runs_ends_and_starts_again(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "r")
    follower = follow(run.run_dir)
    assert follower.status == "starting"
    for status in ("running", "stopped"):
        run.summary(status)
        follower.poll()
        assert follower.status == status
    assert follower.has_ended
    begun = (run.run_dir / "summary.json").stat().st_mtime + 5
    append(
        run.run_dir / "ledger" / "rank0.jsonl",
        json.dumps({"v": 1, "kind": "run", "unix_s": begun, "rank": 0}) + "\n",
    )
    follower.poll()
    assert follower.status == "starting"
    assert not follower.has_ended


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError):
            follow(path)


def test_records_of_another_version_are_refused(tmp_path: Path) -> None:
    run = GrowingRun(tmp_path / "r")
    append(run.run_dir / "metrics.jsonl", '{"v": 99, "step": 1, "time": 0, "metrics": {}}\n')
    with pytest.raises(ValueError, match="version 99"):
        follow(run.run_dir)
