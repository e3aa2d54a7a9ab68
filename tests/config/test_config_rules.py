"""Contradictions die before anything starts, and the message says what would be valid."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.config import Config, ConfigError, decide_old_logprob, load_config
from paceline.config.rules import RULES, old_logprob_source_exists

BASE: dict[str, Any] = {"model": {"path": "org/model"}, "task": {"name": "word_sorting"}}


def load(*overrides: str) -> Config:
    return load_config(None, overrides, base=BASE)


def refusal(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    assert len(caught.value.problems) == 1, str(caught.value)
    return caught.value


@pytest.mark.parametrize(
    ("overrides", "key", "nearest"),
    [
        (["model.path="], "model.path", None),
        (["run.name=a/b"], "run.name", "a-b"),
        (["run.name=.."], "run.name", "run"),
        (["run.name="], "run.name", "run"),
        (["task.path=x.jsonl"], "task.name", None),
        (["task.name=null"], "task.name", None),
        (["task.name=null", "task.path=x.jsonl", "task.params.a=1"], "task.params", None),
        (["task.eval_path=y.jsonl"], "task.eval_path", None),
        (["task.eval_size=0", "run.eval_every=5"], "run.eval_every", None),
        (["batch.num_prompts=12", "batch.mini_batch_prompts=5"], "batch.mini_batch_prompts", "4"),
        (["batch.num_prompts=12", "batch.mini_batch_prompts=24"], "batch.mini_batch_prompts", "12"),
        (["rollout.temperature=0"], "rollout.temperature", "1.0"),
        (["rollout.top_p=0.8"], "rollout.top_p", "1.0"),
        (["rollout.top_p=0.999"], "rollout.top_p", "1.0"),
        (["batch.num_samples=1", "algorithm.advantage=group_norm"], "batch.num_samples", None),
        (["batch.num_samples=1", "algorithm.advantage=group_center"], "batch.num_samples", None),
        (["batch.num_samples=1", "algorithm.advantage=leave_one_out"], "batch.num_samples", None),
        (
            ["batch.num_samples=1", "algorithm.advantage=batch_whiten", "algorithm.dynamic_sampling=true"],
            "batch.num_samples",
            "2",
        ),
        (["rollout.max_new_tokens=100", "algorithm.overlong_cache=101"], "algorithm.overlong_cache", "100"),
        (["algorithm.loss=cispo", "algorithm.dual_clip=3"], "algorithm.dual_clip", "null"),
        (["algorithm.kl_placement=reward"], "algorithm.kl_placement", None),
        (["algorithm.old_logprob=current", "batch.num_epochs=2"], "algorithm.old_logprob", "rollout"),
        (["algorithm.old_logprob=current", "batch.mini_batch_prompts=8"], "algorithm.old_logprob", "rollout"),
        (["run.num_steps=3", "train.warmup_steps=4"], "train.warmup_steps", "3"),
        (["train.betas=[0.9, 1.0]"], "train.betas", None),
        (["rollout.max_new_tokens=64", "model.max_context=64"], "rollout.max_new_tokens", "63"),
        (["batch.token_budget=256", "rollout.max_new_tokens=256"], "batch.token_budget", None),
        (["batch.token_budget=1024", "model.max_context=1025"], "batch.token_budget", None),
        (["batch.forward_token_budget=100"], "batch.forward_token_budget", None),
        (
            ["cluster.num_devices=4", "cluster.tensor_parallel_size=3"],
            "cluster.tensor_parallel_size",
            "2",
        ),
    ],
)
def test_a_contradiction_is_refused_under_its_key(
    overrides: list[str], key: str, nearest: str | None
) -> None:
    error = refusal(*overrides)
    assert error.key == key
    if nearest is not None:
        assert error.nearest == nearest


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["task.name=null", "task.path=x.jsonl", "task.eval_path=y.jsonl"],
        ["batch.num_samples=1", "algorithm.advantage=batch_whiten"],
        ["algorithm.kl_placement=reward", "algorithm.kl_coefficient=0.01"],
        ["algorithm.old_logprob=current"],
        ["algorithm.old_logprob=current", "batch.mini_batch_prompts=16"],
        ["algorithm.old_logprob=rollout", "batch.num_epochs=3"],
        ["batch.token_budget=257", "rollout.max_new_tokens=256"],
        ["batch.token_budget=128", "batch.overlong=own_micro_batch"],
        ["batch.token_budget=1024", "model.max_context=1024"],
        ["rollout.max_new_tokens=100", "algorithm.overlong_cache=100"],
        ["rollout.temperature=0.5"],
        ["task.eval_temperature=0"],
        ["run.num_steps=3", "train.warmup_steps=3"],
    ],
)
def test_what_only_looks_like_a_contradiction_passes(overrides: list[str]) -> None:
    load(*overrides)


def test_every_broken_rule_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(
            "rollout.temperature=0",
            "rollout.top_p=0.8",
            "batch.mini_batch_prompts=5",
            "cluster.num_devices=4",
            "cluster.shard_size=3",
        )
    assert {problem.key for problem in caught.value.problems} == {
        "rollout.temperature",
        "rollout.top_p",
        "batch.mini_batch_prompts",
        "cluster.shard_size",
    }


def test_the_refusal_of_greedy_training_says_why() -> None:
    assert "greedy samples have no distribution" in str(refusal("rollout.temperature=0"))
    assert "truncated distribution" in str(refusal("rollout.top_p=0.8"))


def test_sampled_logprobs_need_an_engine_that_returns_them() -> None:
    config = load("algorithm.old_logprob=rollout")
    other = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": "other"})})
    problem = old_logprob_source_exists(other)
    assert problem is not None and problem.nearest == "recompute"


@pytest.mark.parametrize(
    ("overrides", "source", "reason"),
    [
        ([], "current", "one update per rollout"),
        (["batch.mini_batch_prompts=16"], "current", "one update per rollout"),
        (["batch.mini_batch_prompts=8"], "rollout", "trainer's own weights"),
        (["batch.num_epochs=2"], "rollout", "trainer's own weights"),
        (["algorithm.old_logprob=recompute"], "recompute", "asked for"),
        (["algorithm.old_logprob=rollout"], "rollout", "asked for"),
        (["algorithm.old_logprob=current"], "current", "asked for"),
    ],
)
def test_old_logprobs_are_computed_only_when_needed(overrides: list[str], source: str, reason: str) -> None:
    decision = decide_old_logprob(load(*overrides))
    assert decision.source == source and reason in decision.reason


def test_an_engine_with_its_own_weights_makes_several_updates_recompute() -> None:
    config = load("batch.num_epochs=2")
    other = config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": "other"})})
    assert decide_old_logprob(other).source == "recompute"


def test_the_context_of_a_local_model_is_checked_before_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512}))
    local = f"model.path={tmp_path}"
    load(local, "model.max_context=512")
    assert refusal(local, "model.max_context=513").nearest == "512"
    assert refusal(local, "rollout.max_new_tokens=512").nearest == "511"


def test_every_rule_has_a_distinct_name() -> None:
    names = [rule.__name__ for rule in RULES if callable(rule)]
    assert len(set(names)) == len(RULES)
