"""Every recipe trains, with its sizes cut down and a tiny model in place of its own."""

from pathlib import Path

import pytest
from tiny_reward_model import write_tiny_reward_model
from tiny_runs import tiny_sections

from paceline.config import load_config
from paceline.config.loading import read_recipe
from paceline.schedules import run_training

RECIPES = [
    recipe
    for recipe in sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
    # recipes of `paceline sft` are trained in test_schedules_sft.py
    if read_recipe(recipe).get("schedule", {}).get("name") != "sft"
]


def _tiny_sources(sources, folder):
    """A tiny reward model in place of each of a recipe's."""
    if any(source.kind == "model" for source in sources.values()):
        write_tiny_reward_model(folder / "rated")
    return {name: {"path": str(folder / "rated")} for name, s in sources.items() if s.kind == "model"}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_with_its_sizes_cut_down(recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "model"))
    tiny_sections(tmp_path)
    as_written = load_config(recipe, ["model.path=unused", "task.reward=auto"])
    task = {"reward": "tiny_rewards:even_share", "eval_size": 4}
    if as_written.task.name is None:
        task["path"] = str(tmp_path / "prompts.jsonl")
    else:
        task |= {"size": 32, "num_examples": 0}
    config = load_config(
        recipe,
        sections={
            "reward": {"sources": _tiny_sources(as_written.reward.sources, tmp_path)},
            "run": {"dir": str(tmp_path / "runs"), "num_steps": 2, "eval_every": 0},
            "model": {"path": str(tmp_path / "model"), "dtype": "float32"},
            "task": task,
            "algorithm": {"overlong_cache": min(as_written.algorithm.overlong_cache or 0, 2)},
            "batch": {"num_prompts": 4, "num_samples": 4, "mini_batch_prompts": 2, "token_budget": 512},
            "rollout": {"max_new_tokens": 6},
            "agent": {"max_turn_tokens": 4} if as_written.agent.is_on else {},
            "train": {"warmup_steps": 0},
            "telemetry": {"live": "off"},
        },
    )
    assert run_training(config).summary["status"] == "completed"
