"""Diagnoses of ledgers whose every second is known."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.config.yaml_scalars import write_yaml
from paceline.diagnosis import diagnose
from paceline.telemetry.causes.records import StepCauses, cause_lines, causes_path
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricLog
from paceline.types import CAUSES

Work = Callable[["KnownRank", int], None]


class KnownRank:
    """A rank whose clock only moves when it is told to."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.now_s = 0.0
        self.ledger = Ledger(run_dir / "ledger" / f"rank{rank}.jsonl", rank, lambda: round(self.now_s * 1e9))

    def spend(self, stage, seconds: float, name: str = "", **known) -> None:
        with self.ledger.span(stage, name, **known):
            self.now_s += seconds


def write_run(run_dir: Path, num_steps: int, *ranks: Work, schedule: str = "sync") -> Path:
    """A run whose ranks did this work in every step."""
    run_dir.mkdir(parents=True)
    settings = {
        "schedule": {"name": schedule},
        "run": {"name": "known"},
        "task": {"reward_workers": 2},
        "batch": {"num_prompts": 4, "num_samples": 4, "layout": "packed"},
    }
    (run_dir / "config.yaml").write_text(write_yaml(settings))
    for number, work in enumerate(ranks):
        rank = KnownRank(run_dir, number)
        for step in range(1, num_steps + 1):
            with rank.ledger.step(step):
                work(rank, step)
        rank.ledger.close()
    return run_dir


def test_the_first_step_and_profiled_steps_are_in_no_statistic(tmp_path: Path):
    def work(rank: KnownRank, step: int) -> None:
        rank.spend("update_actor", {1: 50.0, 3: 20.0}.get(step, 2.0))

    run_dir = write_run(tmp_path / "run", 5, work)
    causes_path(run_dir, 0).parent.mkdir()
    lines = cause_lines(StepCauses(3, {"update_actor": dict.fromkeys(CAUSES, 0.0) | {"compute": 20.0}}))
    causes_path(run_dir, 0).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = diagnose(run_dir)
    assert (found.num_steps, found.num_warmup_steps, found.num_profiled_steps) == (3, 1, 1)
    assert found.step_s == pytest.approx(2.0)


def test_a_step_whose_profile_was_lost_is_in_no_statistic_either(tmp_path: Path):
    def work(rank: KnownRank, step: int) -> None:
        rank.spend("update_actor", 20.0 if step == 3 else 2.0)

    run_dir = write_run(tmp_path / "run", 5, work)
    log = MetricLog(run_dir)
    for step in range(1, 6):
        log.record(step, {"profiled": 1.0} if step == 3 else {})
    log.close()
    found = diagnose(run_dir)
    assert (found.num_steps, found.num_warmup_steps, found.num_profiled_steps) == (3, 1, 1)
    assert found.step_s == pytest.approx(2.0)


def test_where_every_step_was_profiled_all_count_and_it_is_said(tmp_path: Path):
    run_dir = write_run(tmp_path / "run", 2, lambda rank, step: rank.spend("update_actor", 2.0))
    causes_path(run_dir, 0).parent.mkdir()
    cells = {"update_actor": dict.fromkeys(CAUSES, 0.0) | {"compute": 2.0}}
    lines = [line for step in (1, 2) for line in cause_lines(StepCauses(step, cells))]
    causes_path(run_dir, 0).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = diagnose(run_dir)
    assert (found.num_steps, found.num_profiled_steps) == (2, 0) and "all_profiled" in found.notes


def test_a_wait_is_for_the_rank_with_more_tokens_or_for_the_slow_one(tmp_path: Path):
    def first(rank: KnownRank, step: int) -> None:
        rank.spend("update_actor", 2.0, tokens=1000)
        rank.spend("idle", 1.0, "for the others' metrics", cause="queue")

    def more_tokens(rank: KnownRank, step: int) -> None:
        rank.spend("update_actor", 3.0, tokens=1500)
        rank.spend("idle", 0.0, "for the others' metrics", cause="queue")

    def slow(rank: KnownRank, step: int) -> None:
        rank.spend("update_actor", 3.0, tokens=1000)
        rank.spend("idle", 0.0, "for the others' metrics", cause="queue")

    uneven = diagnose(write_run(tmp_path / "uneven", 5, first, more_tokens))
    assert uneven.findings[0].id == "token_imbalance" and uneven.findings[0].values["rank"] == 1
    assert uneven.findings[0].seconds == pytest.approx(1.0)
    late = diagnose(write_run(tmp_path / "slow", 5, first, slow))
    assert late.findings[0].id == "slow_rank" and late.findings[0].values["where"] == "update_actor"
    assert [one.excess_s for one in late.ranks] == pytest.approx([-1.0, 1.0])


def test_what_all_ranks_spend_in_an_exchange_is_the_link_and_the_rest_a_wait(tmp_path: Path):
    def exchanging(seconds: float) -> Work:
        def work(rank: KnownRank, step: int) -> None:
            rank.spend("rollout", 10.0 - seconds)
            rank.spend("sync", seconds, "gather weights", cause="communication")

        return work

    found = diagnose(write_run(tmp_path / "run", 5, exchanging(4.0), exchanging(2.5)))
    by_id = {one.id: one for one in found.findings}
    assert by_id["slow_link"].seconds == pytest.approx(2.5) and by_id["slow_link"].stage == "sync"
    assert by_id["slow_rank"].seconds == pytest.approx(1.5) and by_id["slow_rank"].values["rank"] == 1


def test_waits_of_profiled_steps_have_the_length_of_the_others(tmp_path: Path):
    """A profiled step is slower: its cells say how a stage divides, not how long it is."""

    def work(rank: KnownRank, step: int) -> None:
        rank.spend("update_actor", 8.0 if step == 3 else 2.0)

    run_dir = write_run(tmp_path / "run", 5, work, work)
    causes_path(run_dir, 0).parent.mkdir()
    cells = dict.fromkeys(CAUSES, 0.0) | {"communication": 4.0, "compute": 2.0, "scheduling": 2.0}
    lines = list(cause_lines(StepCauses(3, {"update_actor": cells})))
    for rank in (0, 1):
        causes_path(run_dir, rank).write_text("".join(json.dumps(line) + "\n" for line in lines))
    waits = {one.kind: one.seconds for one in diagnose(run_dir).waits}
    assert waits == pytest.approx({"weights": 1.0, "host": 0.5})


def test_prompts_are_repeated_in_groups_and_supervised_rows_have_none(tmp_path: Path):
    found = {}
    for schedule in ("sync", "sft"):
        run_dir = write_run(
            tmp_path / schedule, 5, lambda rank, step: rank.spend("update_actor", 2.0), schedule=schedule
        )
        log = MetricLog(run_dir)
        for step in range(1, 6):
            log.record(
                step, {"tokens/prompt": 900.0, "tokens/response": 100.0, "tokens/effective_share": 1.0}
            )
        log.close()
        found[schedule] = {one.id for one in diagnose(run_dir).findings}
    assert "repeated_prompts" in found["sync"] and "repeated_prompts" not in found["sft"]


def test_a_run_that_slows_down_drifts_and_a_steady_one_does_not(tmp_path: Path):
    rising = write_run(tmp_path / "up", 14, lambda rank, step: rank.spend("rollout", 5.0 + 0.2 * step))
    steady = write_run(
        tmp_path / "flat", 14, lambda rank, step: rank.spend("rollout", 5.0 + 0.01 * (step % 3))
    )
    found = diagnose(rising)
    assert found.drift is not None and found.drift.is_drift
    assert found.drift.slope_s == pytest.approx(0.2) and found.drift.change_s == pytest.approx(2.4)
    assert [one.id for one in found.findings] == ["drift"]
    assert diagnose(steady).findings == ()


def test_the_command_prints_numbers_and_both_languages(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def waiting(rank: KnownRank, step: int) -> None:
        rank.spend("rollout", 3.0)
        rank.spend("reward", 1.0, cause="queue")

    run_dir = str(write_run(tmp_path / "run", 4, waiting))
    assert main(["diagnose", run_dir, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["v"] == 1 and printed["findings"][0]["id"] == "slow_reward"
    assert main(["diagnose", run_dir]) == 0
    assert "waits 1 s for rewards" in capsys.readouterr().out
    assert main(["diagnose", run_dir, "--lang", "zh"]) == 0
    assert "等待奖励 1 s" in capsys.readouterr().out
    assert main(["diagnose", run_dir, "--lang", "fr"]) == 2
    assert main(["diagnose", str(tmp_path)]) == 2
