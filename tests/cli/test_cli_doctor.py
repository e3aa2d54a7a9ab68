"""The doctor looks, measures and advises, without loading a model."""

from pathlib import Path

import pytest

from paceline.cli.doctor import FAIL, OK, WARN, Check, disk, examine, tokenizers_parallelism

NAMED = ["model.path=org/model", "task.name=word_sorting"]


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


@pytest.fixture(autouse=True)
def in_a_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_machine_alone_is_examined_without_a_recipe() -> None:
    checks = by_name(examine(None, []))
    wanted = {
        "python",
        "torch",
        "transformers",
        "cpu",
        "threads",
        "memory",
        "attention",
        "tokenizers",
        "disk space",
    }
    assert wanted <= set(checks) and "recipe" not in checks
    assert "bfloat16" in checks["cpu"].found and "MiB/s" in checks["disk speed"].found


def test_a_valid_recipe_gets_its_arithmetic() -> None:
    checks = by_name(examine(None, [*NAMED, "checkpoint.every=10"]))
    assert checks["recipe"].status == checks["checkpoint.every"].status == OK
    assert "128 samples and 1 updates per step" in checks["recipe"].found


def test_every_problem_of_a_recipe_is_a_failed_line_and_the_machine_is_still_examined() -> None:
    checks = by_name(examine(None, [*NAMED, "rollout.temperature=0", "rollout.top_p=0.8"]))
    assert checks["rollout.temperature"].status == checks["rollout.top_p"].status == FAIL
    assert checks["python"].status == OK


@pytest.mark.parametrize(
    ("overrides", "name", "status"),
    [
        (["run.num_steps=1000"], "checkpoint.every", WARN),
        (["run.num_steps=10"], "checkpoint.every", OK),
        (["run.num_steps=10", "checkpoint.every=11"], "checkpoint.every", WARN),
        (["checkpoint.every=1", "checkpoint.asynchronous=false"], "checkpoint.every", WARN),
        (["run.eval_every=1"], "run.eval_every", WARN),
        (["run.num_steps=100000"], "run.save_samples_every", WARN),
        (["task.reward_workers=100000"], "task.reward_workers", WARN),
        (["model.path=./not_there"], "model.path", FAIL),
        (["model.path=org/model"], "model.path", OK),
        (["task.name=null", "task.path=not_there.jsonl"], "task.path", FAIL),
    ],
)
def test_a_recipe_that_would_cost_time_or_fail_is_told_so(
    overrides: list[str], name: str, status: str
) -> None:
    check = by_name(examine(None, [*NAMED, *overrides]))[name]
    assert check.status == status
    assert check.advice or status == OK


def test_a_local_model_folder_is_looked_at(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert by_name(examine(None, [*NAMED, f"model.path={folder}"]))["model.path"].status == FAIL
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert "llama" in by_name(examine(None, [*NAMED, f"model.path={folder}"]))["model.path"].found


def test_the_disk_probe_leaves_nothing_behind_and_takes_a_folder_that_does_not_exist_yet(
    tmp_path: Path,
) -> None:
    space, speed = disk(tmp_path / "runs/deep")
    assert "GiB free" in space.found and speed.status != FAIL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("setting", "status"), [("false", WARN), ("0", WARN), ("true", OK)])
def test_a_serial_tokenizer_is_pointed_out(
    monkeypatch: pytest.MonkeyPatch, setting: str, status: str
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", setting)
    assert tokenizers_parallelism().status == status
