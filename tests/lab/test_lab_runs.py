"""A whole small ablation: real processes, a kill in the middle, an arm that cannot be run, and the same result."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import tiny_sections

from paceline.cli import main
from paceline.config import ConfigError
from paceline.config.yaml_scalars import write_yaml
from paceline.lab.arms import parse_features
from paceline.lab.plan import AblationSettings, make_plan
from paceline.lab.results import Ablation, read_ablation
from paceline.lab.runs import run_all
from paceline.telemetry.jsonl import read_lines

TESTS = Path(__file__).parents[1]
LIMIT_S = 240.0
FEATURES = "no_sharing:batch.share_prefixes=off,impossible:batch.token_budget=8"


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    paths = [str(TESTS / "model"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    path = tmp_path / "recipe.yaml"
    sections = tiny_sections(tmp_path, task={"eval_size": 0})
    sections["batch"]["share_prefixes"] = "on"  # auto would decide for one of the two that are compared
    path.write_text(write_yaml(sections))
    return path


def command(recipe: Path, out: Path) -> list[str]:
    settings = ["--pairs", "1", "--steps", "2", "--warmup", "1", "--rollouts", "replay"]
    return ["ablate", str(recipe), "--features", FEATURES, *settings, "--out", str(out)]


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)  # another process makes the file; nothing tells of it


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
def test_an_ablation_killed_in_the_middle_goes_on_where_it_was(tmp_path: Path, recipe: Path, capsys) -> None:
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-m", "paceline", *command(recipe, out)])
    wait_for(
        out / "runs" / "r00-no_sharing" / "config.yaml", process
    )  # the recording is done, a run under way
    process.send_signal(signal.SIGKILL)
    process.wait()
    refused = main(command(recipe, out))
    if (
        refused
    ):  # the run that the killed ablation left behind is still going on: nothing is measured beside it
        assert refused == 2 and "still going on" in capsys.readouterr().err
    deadline = time.monotonic() + LIMIT_S
    while refused and time.monotonic() < deadline:
        time.sleep(0.5)  # the orphaned run ends by itself; nothing tells of it
        refused = main(command(recipe, out))
    assert refused == 0
    ablation = read_ablation(out)
    check_result(ablation)
    attempts = [record["run"] for record in read_lines(out / "attempts.jsonl") if record]
    assert attempts.count("recording") == 1 and attempts.count("r00-baseline") == 1
    assert "`no_sharing`" in (out / "ablation.md").read_text()

    assert main([*command(recipe, out), "--json"]) == 0  # everything is done: nothing is started
    assert len(attempts) == len([record for record in read_lines(out / "attempts.jsonl") if record])
    with pytest.raises(ConfigError, match="another num_steps"):
        settings = AblationSettings(num_pairs=1, num_steps=3, num_warmup=1, rollouts="replay")
        run_all(make_plan(str(recipe), [], parse_features([FEATURES]), settings, out), print, lambda: None)


def check_result(ablation: Ablation) -> None:
    """One pair: figures without an interval; identical input, and updates within what another order of sums makes."""
    assert ablation.status == "complete" and ablation.replayed
    row, impossible = ablation.rows
    assert row.num_pairs == 1 and row.verdict == "undecided"
    assert row.correctness.loss_difference is not None and row.correctness.loss_difference < 1e-6
    assert row.correctness.grad_norm_difference is not None and row.correctness.grad_norm_difference < 1e-3
    assert row.figures["reward"].difference.mean == 0.0 and row.arm is not None and row.arm.stages
    assert impossible.num_pairs == 0 and impossible.num_failed == 1 and "token_budget" in impossible.message
    assert ablation.baseline is not None and "reward" not in ablation.baseline.stages
    assert ablation.environment["device"] == "cpu"
    assert {entry.status for entry in ablation.runs} == {"completed", "refused"}


def test_a_baseline_that_cannot_be_run_ends_the_ablation_with_its_message(
    tmp_path: Path, recipe: Path, capsys
) -> None:
    (tmp_path / "prompts.jsonl").write_text("")
    assert main(command(recipe, tmp_path / "out")) == 1
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("failed: recording refused") and "Traceback" not in said
