"""`paceline profile`: a few steps of a recipe, and where the last one's time went."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from tiny_runs import tiny_sections

from paceline.cli.profile import free_name, print_profile, profiling_config
from paceline.config import ConfigError
from paceline.telemetry.causes.records import KernelTotal, StepCauses, append_causes, causes_path
from paceline.types import CAUSES

NAMED = ["model.path=org/model", "task.name=word_sorting"]


def recipe(tmp_path: Path, **changes: dict[str, object]) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(tiny_sections(tmp_path, **changes)))
    return path


def test_a_few_steps_run_and_the_last_ones_cells_are_printed(tmp_path: Path) -> None:
    path = recipe(tmp_path, checkpoint={"every": 1}, run={"eval_every": 1, "num_steps": 50})
    command = [sys.executable, "-m", "paceline", "profile", str(path), "--steps", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    run_dir = tmp_path / "runs" / "r-profile"
    assert found["run"] == str(run_dir)
    (rank,) = found["ranks"]
    assert (rank["rank"], rank["steps"], rank["basis"], rank["is_complete"]) == (0, [2], "operators", True)
    cells = rank["cells"]
    assert set(cells) >= {"data", "rollout", "reward", "update_actor"} and "eval" not in cells
    assert sum(sum(own.values()) for own in cells.values()) == pytest.approx(rank["seconds"])
    assert found["roofline"]["stages"]["update_actor"]["tflops"] > 0
    assert found["roofline"]["stages"]["rollout"]["gbs"] > 0
    assert not (run_dir / "checkpoints").exists()


def environment() -> dict[str, str]:
    """This process's, with what its imports come from."""

    return {**os.environ, "PYTHONPATH": ":".join(path for path in sys.path if path)}


def test_the_run_is_cut_down_and_what_is_given_wins() -> None:
    config = profiling_config(None, [*NAMED, "run.num_steps=500", "train.warmup_steps=100"], 4)
    assert config.run.num_steps == 500 and config.train.warmup_steps == 100
    config = profiling_config(None, NAMED, 4)
    assert (config.run.num_steps, config.telemetry.profile_every, config.task.eval_size) == (4, 4, 0)
    assert (config.checkpoint.every, config.checkpoint.save_final) == (0, False)
    assert config.run.name.endswith("-profile")


def test_a_recipe_of_a_long_warm_up_can_be_profiled(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("model: {path: org/model}\ntask: {name: word_sorting}\ntrain: {warmup_steps: 40}\n")
    assert profiling_config(str(path), [], 3).train.warmup_steps == 0


def test_a_refused_recipe_is_refused_with_its_reason() -> None:
    with pytest.raises(ConfigError, match=r"train\.lr"):
        profiling_config(None, [*NAMED, "train.lr=-1"], 3)


def test_a_profile_never_writes_into_another_run(tmp_path: Path) -> None:
    assert free_name(tmp_path / "none", "a-profile") == "a-profile"
    for name in ("a-profile", "a-profile-2", "b"):
        (tmp_path / name).mkdir()
    assert free_name(tmp_path, "a-profile") == "a-profile-3"


def test_the_tables_show_every_rank_and_unknown_kernels(tmp_path: Path) -> None:
    for rank in (0, 1):
        cells = {
            "rollout": dict.fromkeys(CAUSES, 0.0) | {"compute": 0.6, "scheduling": 0.2},
            "idle": dict.fromkeys(CAUSES, 0.0) | {"queue": 0.2 * (rank + 1)},
        }
        kernels = (KernelTotal("secret", "compute", "", False, 1, 0.1),)
        append_causes(causes_path(tmp_path, rank), StepCauses(3, cells, kernels))
    console = Console(width=130)
    with console.capture() as capture:
        print_profile(tmp_path, console)
    text = capture.get()
    assert "rank 0, step 3" in text and "rank 1, step 3" in text
    assert "600.0" in text and "no pattern knows secret: 100.000 ms" in text
    assert "60.0%" in text  # compute of rank 0: 600 of 1,000 ms
    assert "From device kernels" in text
