"""Exit codes and last lines are what schedulers see: 0 done, 1 failed while running, 2 refused before starting."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import paceline
from paceline.cli import main
from paceline.config import Config

NAMED = ["model.path=org/model", "task.name=word_sorting"]


def recipe(tmp_path: Path, text: str = "") -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: {{path: org/model}}\ntask: {{name: word_sorting}}\n{text}")
    return path


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Stands in for the driver, to inject what it may end with; `configs` are the runs that were started."""
    state = SimpleNamespace(configs=[], ends_with=None)

    def run_training(config: Config) -> SimpleNamespace:
        state.configs.append(config)
        if state.ends_with is not None:
            raise state.ends_with
        return SimpleNamespace(run_dir=Path(config.run.dir) / config.run.name, summary={})

    module = ModuleType("paceline.schedules")
    module.run_training = run_training  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "paceline.schedules", module)
    return state


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_a_finished_run_is_0_and_says_where_it_lies(
    tmp_path: Path, driver: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["train", str(recipe(tmp_path, "train: {lr: 1e-6}\n")), "run.name=first", "train.eps=1e-6"]) == 0
    )
    assert capsys.readouterr().out == "run: runs/first\n"
    [config] = driver.configs
    assert (config.train.lr, config.train.eps) == (1e-6, 1e-6)


def test_settings_alone_make_a_run(driver: SimpleNamespace) -> None:
    assert main(["train", *NAMED, "run.seed=7"]) == 0
    assert driver.configs[0].run.seed == 7


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "train.lerning_rate=1e-6",
            "refused: train.lerning_rate = 1e-06: section train has no such key (nearest: train.lr)",
        ),
        ("batch.mini_batch_prompts=5", "must divide batch.num_prompts = 16 (nearest: 4)"),
        ("rollout.top_p=0.8", "(nearest: 1.0)"),
        ("batch.num_prompts=0", "must be greater than or equal to 1 (nearest: 1)"),
    ],
)
def test_a_bad_setting_is_2_with_key_value_rule_and_nearest_on_the_last_line(
    tmp_path: Path, driver: SimpleNamespace, capsys: pytest.CaptureFixture[str], override: str, line: str
) -> None:
    assert main(["train", str(recipe(tmp_path)), override]) == 2
    shown = last_line(capsys)
    assert shown.startswith(f"refused: {override.partition('=')[0]} = ") and line in shown
    assert driver.configs == []


@pytest.mark.parametrize(
    "arguments",
    [["train"], ["train", "missing.yaml"], ["trian"], ["train", "r.yaml", "--fast"], ["report", "nowhere"]],
)
def test_a_wrong_call_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert last_line(capsys)


def test_a_refusal_that_needed_the_data_is_2_too(
    driver: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.ends_with = paceline.ConfigError("task.path", "p.jsonl", "holds 0 prompts, and a step needs 16")
    assert main(["train", *NAMED]) == 2
    assert last_line(capsys) == "refused: task.path = 'p.jsonl': holds 0 prompts, and a step needs 16"


def test_an_exception_while_running_is_1_with_the_cause_on_the_last_lines(
    driver: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    driver.ends_with = RuntimeError("step 3 failed")
    driver.ends_with.__cause__ = ValueError("the grader's module is gone")
    assert main(["train", *NAMED]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-2:] == [
        "caused by: ValueError: the grader's module is gone",
        "failed: RuntimeError: step 3 failed",
    ]


def test_an_interrupted_run_is_not_reported_as_done(driver: SimpleNamespace) -> None:
    driver.ends_with = KeyboardInterrupt()
    assert main(["train", *NAMED]) not in (0, 2)


@pytest.mark.parametrize(
    "launcher", [["-m", "paceline"], ["-c", "import sys; from paceline.cli import main; sys.exit(main())"]]
)
def test_the_code_reaches_the_shell(tmp_path: Path, launcher: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *launcher, "train", str(recipe(tmp_path)), "train.lerning_rate=1e-6"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("refused: train.lerning_rate")


def test_a_dry_run_prints_the_arithmetic_and_starts_nothing(
    tmp_path: Path,
    driver: SimpleNamespace,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = recipe(tmp_path, "batch: {num_prompts: 6, num_samples: 4}\n")
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(path), "--dry-run"]) == 0
    assert "6 prompts x 4 samples = 24" in capsys.readouterr().out
    assert driver.configs == [] and list(tmp_path.iterdir()) == [path]
    assert main(["train", str(path), "rollout.temperature=0", "--dry-run"]) == 2


def test_the_settings_are_listed_and_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert 'run.dir = "runs"' in listed and "train.lr = 1e-06" in listed
    assert main(["config", "--explain"]) == 0
    assert "Peak learning rate." in capsys.readouterr().out


def test_a_folder_that_is_no_run_names_the_runs_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first/config.yaml").write_text("{}")
    assert main(["report", str(tmp_path / "frist")]) == 2
    assert str(tmp_path / "first") in last_line(capsys)
    assert main(["report", str(tmp_path), "--json"]) == 2
    assert str(tmp_path / "first") in last_line(capsys)


@pytest.mark.parametrize("command", ["report", "diagnose", "explain", "trace", "watch"])
def test_every_command_that_reads_a_run_says_which_there_are(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first/config.yaml").write_text("{}")
    assert main([command, str(tmp_path / "frist")]) == 2
    assert "there is no such folder" in (line := last_line(capsys)) and str(tmp_path / "first") in line


def test_python_trains_with_keywords_that_give_way_to_overrides(
    tmp_path: Path, driver: SimpleNamespace
) -> None:
    run = paceline.train(
        recipe(tmp_path, "train: {lr: 1.0, eps: 1.0, grad_clip: 1.5}\n"),
        train={"lr": 1e-5, "eps": 1e-5},
        run={"dir": str(tmp_path)},
        overrides=["train.eps=1e-7"],
    )
    [config] = driver.configs
    assert (config.train.lr, config.train.eps, config.train.grad_clip) == (1e-5, 1e-7, 1.5)
    assert run.dir == tmp_path / "run"


def test_python_gets_the_same_refusal(driver: SimpleNamespace) -> None:
    with pytest.raises(paceline.ConfigError, match=r"nearest: train\.lr"):
        paceline.train(model={"path": "a"}, task={"name": "b"}, train={"lerning_rate": 1e-5})


def test_doctor_as_json_is_a_list_of_checks(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--json"])
    checks = json.loads(capsys.readouterr().out)
    assert all(set(check) == {"name", "status", "found", "advice"} for check in checks)


def test_doctor_on_a_refused_recipe_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(recipe(tmp_path, "rollout: {temperature: 0}\n"))]) == 2
    assert "greedy" in capsys.readouterr().out
