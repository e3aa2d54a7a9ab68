"""A run is held against its device before weights are read."""

import json

import pytest
import torch
from tiny_runs import tiny_sections

from paceline.config import ConfigError, load_config
from paceline.planner.fit import usable_bytes
from paceline.planner.run_memory import estimate_run
from paceline.schedules import run_training
from paceline.schedules.memory import run_facts, settle_budget
from paceline.schedules.place import Place

CPU = torch.device("cpu")
HERE = Place(CPU)


def test_a_run_that_does_not_fit_is_refused_before_it_starts(tmp_path):
    config = load_config(None, sections=tiny_sections(tmp_path, cluster={"device_memory_gb": 0.5}))
    with pytest.raises(ConfigError, match="the run needs"):
        run_training(config)
    assert not list((tmp_path / "runs").rglob("metrics.jsonl"))


def test_a_host_is_checked_against_stated_memory_only(tmp_path):
    sections = tiny_sections(tmp_path)
    config = load_config(None, sections=sections)
    assert settle_budget(config, HERE, 8, 16) is config
    stated = load_config(None, sections={**sections, "cluster": {"device_memory_gb": 0.8}})
    with pytest.raises(ConfigError, match="the run needs"):
        settle_budget(stated, HERE, 8, 16)


def test_float32_weights_are_their_own_masters(tmp_path):
    config = load_config(None, sections=tiny_sections(tmp_path))
    facts = run_facts(config, CPU, 8)
    assert facts is not None
    assert estimate_run(config, facts).part("masters") == 0


def automatic(tmp_path, **changes):
    return load_config(None, sections=tiny_sections(tmp_path, batch={"token_budget": "auto"}, **changes))


def test_an_automatic_budget_holds_a_whole_mini_batch_where_memory_allows(tmp_path):
    config = settle_budget(automatic(tmp_path, cluster={"device_memory_gb": 8}), HERE, 8, 16)
    assert config.batch.token_budget == 16 * config.batch.num_prompts * config.batch.num_samples


def test_an_automatic_budget_is_what_memory_allows_where_that_is_less(tmp_path):
    batch = {"token_budget": "auto", "num_prompts": 64, "num_samples": 16}
    sections = tiny_sections(tmp_path, batch=batch, rollout={"max_new_tokens": 100})
    facts = run_facts(load_config(None, sections=sections), CPU, 20)
    assert facts is not None
    wanted = estimate_run(load_config(None, sections=sections), facts, 2100).total
    gigabytes = (wanted + 0.75 * 2**30) / 0.95 / 1e9
    config = load_config(None, sections={**sections, "cluster": {"device_memory_gb": gigabytes}})
    assert usable_bytes(gigabytes * 1e9) == pytest.approx(wanted)
    assert settle_budget(config, HERE, 20, 120).batch.token_budget == 2048


def test_an_automatic_budget_below_the_longest_sample_is_refused_with_what_would_fit(tmp_path):
    with pytest.raises(ConfigError, match="the run needs"):
        settle_budget(automatic(tmp_path, cluster={"device_memory_gb": 0.8}), HERE, 8, 16)


def test_a_run_with_an_automatic_budget_trains_and_records_it(tmp_path):
    config = automatic(tmp_path)
    result = run_training(config)
    steps = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    budgets = {
        row["metrics"]["memory/token_budget"] for row in steps if "memory/token_budget" in row["metrics"]
    }
    assert len(budgets) == 1 and budgets.pop() > 0
    assert "token_budget: auto" in (result.run_dir / "config.yaml").read_text()


def test_a_cache_given_back_between_rollouts_changes_no_number(tmp_path):
    rewards = []
    for index, keep in enumerate((True, False)):
        rollout = {"max_new_tokens": 6, "keep_cache": keep}
        sections = tiny_sections(
            tmp_path,
            rollout=rollout,
            run={"name": f"r{index}", "dir": str(tmp_path / "runs"), "num_steps": 2},
        )
        result = run_training(load_config(None, sections=sections))
        rows = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
        rewards.append([(row["metrics"].get("reward/mean"), row["metrics"].get("grad_norm")) for row in rows])
    assert rewards[0] == rewards[1]
