"""Whole small PPO runs: the critic learns, the policy learns from it, a resume is bit-equal, nothing is silent."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import ROLLOUT_CLOCKS, tiny_sections

from paceline.config import ConfigError, load_config
from paceline.report.writer import write_report
from paceline.schedules import recorder, run_training
from paceline.telemetry.metrics import read_metrics
from paceline.telemetry.records import read_ledger, summarise

TESTS = Path(__file__).parents[1]
PPO = {"algorithm": {"name": "ppo"}, "task": {"eval_size": 0}, "critic": {"lr": 1e-3}}


@pytest.fixture(autouse=True)
def rewards_are_importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS / "model"))


def settings(tmp_path, **changes):
    sections = tiny_sections(tmp_path, **PPO)
    return load_config(
        None, sections={n: {**sections.get(n, {}), **changes.get(n, {})} for n in {*sections, *changes}}
    )


def train(tmp_path, **changes):
    return run_training(settings(tmp_path, **changes))


def metrics(run_dir):
    """Every metric that does not measure time or memory, or what its process met before, by step."""
    timed = (
        "time/",
        "throughput/",
        "memory/",
        "tflops/",
        "mfu/",
        "checkpoint/",
        "batch/",
        "critic/batch/",
        *ROLLOUT_CLOCKS,
    )
    return {
        record.step: {name: value for name, value in record.metrics.items() if not name.startswith(timed)}
        for record in read_metrics(run_dir)
    }


def sample_rows(run_dir, step):
    return [json.loads(line) for line in (run_dir / "samples" / f"step{step}.jsonl").read_text().splitlines()]


def saved(run_dir, step, group):
    return load_file(run_dir / "checkpoints" / f"step_{step}" / f"{group}.safetensors")


def even_share(run_dir, step):
    """What of the step's reward was the policy's doing."""
    words = [word for row in sample_rows(run_dir, step) for word in row["completion"].split()]
    return float(np.mean([word[1:].isdigit() and int(word[1:]) % 2 == 0 for word in words]))


def test_the_critic_learns_what_a_prompt_is_worth_and_the_policy_what_it_is_paid_for(tmp_path):
    result = train(
        tmp_path,
        run={"num_steps": 30},
        task={"reward": "tiny_rewards:easy_and_hard_prompts"},
        batch={"num_prompts": 8, "num_samples": 8, "token_budget": 1024},
        critic={"lr": 3e-3, "num_epochs": 4, "pretrain_steps": 5},
        checkpoint={"save_final": False},
    )
    found = metrics(result.run_dir)
    first, last = range(1, 6), range(26, 31)

    def mean(name, steps):
        return np.mean([found[step][name] for step in steps])

    assert mean("critic/explained_variance", last) > 0.4 > 0.2 > mean("critic/explained_variance", first)
    # four times the updates see the first values, so the loss is per update
    assert mean("critic/loss", last) < 0.4 * mean("critic/loss", first)
    assert abs(mean("values/mean", last) - mean("returns/mean", last)) < 0.2
    share = [np.mean([even_share(result.run_dir, step) for step in steps]) for steps in (first, last)]
    assert share[1] > share[0] + 0.06


def test_a_step_has_the_critics_stages_and_metrics(tmp_path):
    result = train(tmp_path, batch={"mini_batch_prompts": 2})
    found = metrics(result.run_dir)
    assert result.summary["status"] == "completed"
    names = {
        "values/mean",
        "returns/mean",
        "critic/loss",
        "critic/explained_variance",
        "critic/clip_fraction",
        "critic/grad_norm",
        "critic/lr",
    }
    for step in found.values():
        assert names <= step.keys()
        assert step["critic/updates/applied"] == step["updates/applied"] == 2
        assert step["critic/lr"] == 1e-3
    # a new head is zeros: the first values are 0, and nothing is explained
    assert found[1]["values/mean"] == 0.0 and found[1]["critic/explained_variance"] == pytest.approx(0.0)
    assert all(row["value"] == 0.0 for row in sample_rows(result.run_dir, 1))
    assert any(row["value"] != 0.0 for row in sample_rows(result.run_dir, 2))
    (rank,) = read_ledger(result.run_dir)
    stages = summarise(rank)["stages"]
    assert {"values", "update_critic", "advantage", "update_actor"} <= stages.keys()
    for step in rank.steps():
        covered = sum(stage.self_s for stage in step.stages.values())
        assert covered + step.unaccounted_s == pytest.approx(step.wall_s)
    page = write_report(result.run_dir).read_text(encoding="utf-8")
    for text in ("estimating values with the critic", "updating the critic", "Values against returns"):
        assert text in page


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm": {"name": "ppo", "kl_coefficient": 0.05, "kl_placement": "reward"}},
        {"algorithm": {"name": "ppo", "kl_coefficient": 0.05, "whiten_advantages": False}},
        {"algorithm": {"name": "ppo", "gamma": 0.9, "gae_lambda": 1.0, "value_clip": 0.0}},
        {"batch": {"num_prompts": 8, "num_samples": 1}},
        {"batch": {"num_prompts": 4, "num_samples": 4, "mini_batch_prompts": 2, "num_epochs": 2}},
        {"batch": {"num_prompts": 4, "num_samples": 4, "token_budget": 64, "layout": "padded"}},
        {"lora": {"rank": 4}},
    ],
    ids=str,
)
def test_ppo_trains_with(tmp_path, changes):
    result = train(tmp_path, run={"num_steps": 2}, checkpoint={"save_final": False}, **changes)
    found = metrics(result.run_dir)
    assert result.summary["status"] == "completed"
    assert all(
        np.isfinite(step["critic/grad_norm"]) and step["critic/grad_norm"] > 0 for step in found.values()
    )
    assert all(step["grad_norm"] > 0 for step in found.values())


def test_the_padded_layout_trains_to_the_same_numbers(tmp_path):
    packed = metrics(train(tmp_path, run={"name": "packed"}).run_dir)
    padded = metrics(train(tmp_path, run={"name": "padded"}, batch={"layout": "padded"}).run_dir)
    for step, expected in packed.items():
        for name in (
            "reward/mean",
            "loss/total",
            "grad_norm",
            "critic/loss",
            "critic/grad_norm",
            "values/mean",
        ):
            assert padded[step][name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


def test_in_the_critics_own_steps_the_policy_stands_still_and_this_is_counted(tmp_path):
    result = train(
        tmp_path, run={"num_steps": 3}, critic={"pretrain_steps": 2}, checkpoint={"every": 1, "keep": 9}
    )
    found = metrics(result.run_dir)
    assert [found[step]["steps/critic_alone"] for step in (1, 2, 3)] == [1, 1, 0]
    assert [found[step].get("updates/applied") for step in (1, 2, 3)] == [None, None, 1]
    assert [found[step]["critic/updates/applied"] for step in (1, 2, 3)] == [1, 1, 1]
    before, after = saved(result.run_dir, 2, "masters"), saved(result.run_dir, 3, "masters")
    untouched = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(before[name], untouched[name]) for name in untouched)
    assert not all(torch.equal(before[name], after[name]) for name in before)
    critics = [saved(result.run_dir, step, "critic_masters") for step in (1, 2)]
    assert not all(torch.equal(critics[0][name], critics[1][name]) for name in critics[0])


def test_the_learning_rate_of_the_policy_spans_the_steps_it_trains_in(tmp_path):
    decay = {"lr": 1e-3, "lr_schedule": "linear"}
    result = train(
        tmp_path,
        run={"num_steps": 4},
        train=decay,
        critic={"lr": 2e-3, "lr_schedule": "linear", "pretrain_steps": 2},
    )
    found = metrics(result.run_dir)
    assert [found[step]["lr"] for step in (3, 4)] == pytest.approx([1e-3, 5e-4])
    assert [found[step]["critic/lr"] for step in (1, 2, 3, 4)] == pytest.approx([2e-3, 1.5e-3, 1e-3, 5e-4])


def test_a_stopped_run_resumes_bit_equal_with_its_critic(tmp_path, monkeypatch):
    changes = {
        "train": {"lr": 1e-3, "lr_schedule": "linear"},
        "critic": {"lr": 2e-3, "lr_schedule": "cosine", "num_epochs": 2, "pretrain_steps": 1},
    }
    whole = train(tmp_path, run={"name": "whole", "num_steps": 4}, **changes)
    config = settings(tmp_path, run={"name": "cut", "num_steps": 4}, **changes)
    original = recorder.Recorder.rollout

    def rollout_then_signal(self, *args):
        original(self, *args)
        if self._run.state.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(recorder.Recorder, "rollout", rollout_then_signal)
        assert run_training(config).summary["num_steps"] == 2
    cut = run_training(config)
    assert cut.summary["status"] == "completed"
    assert metrics(cut.run_dir) == metrics(whole.run_dir)
    for group in ("masters", "moments", "critic_masters", "critic_moments"):
        expected, found = saved(whole.run_dir, 4, group), saved(cut.run_dir, 4, group)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected), group


def test_a_run_resumed_without_its_critic_or_with_a_new_one_is_refused(tmp_path):
    train(tmp_path, run={"num_steps": 1})
    with pytest.raises(ConfigError, match="the checkpoint holds a critic"):
        run_training(load_config(None, sections=tiny_sections(tmp_path)))
    grpo = tiny_sections(tmp_path, run={"name": "grpo", "num_steps": 1}, task={"eval_size": 0})
    run_training(load_config(None, sections=grpo))
    with pytest.raises(ConfigError, match="the checkpoint holds no critic"):
        train(tmp_path, run={"name": "grpo", "num_steps": 2})


def test_samples_without_a_verdict_reach_neither_policy_nor_critic_and_are_counted(tmp_path):
    result = train(tmp_path, task={"reward": "tiny_rewards:sometimes_raises"}, run={"num_steps": 1})
    found = metrics(result.run_dir)[1]
    assert found["samples/without_verdict"] == found["reward/errors"] > 0
    rows = sample_rows(result.run_dir, 1)
    scored = sum(row["num_tokens"] for row in rows if row["outcome"] == "score")
    assert found["tokens/loss"] == scored
    assert all(row["advantage"] == 0.0 for row in rows if row["outcome"] == "error")


def test_advantages_are_whitened_over_the_whole_step(tmp_path):
    result = train(tmp_path, run={"num_steps": 1}, rollout={"max_new_tokens": 1})
    advantages = np.array([row["advantage"] for row in sample_rows(result.run_dir, 1)])
    assert advantages.mean() == pytest.approx(0.0, abs=1e-6) and advantages.std() == pytest.approx(
        1.0, rel=1e-5
    )
    rewards = np.array([row["reward"] for row in sample_rows(result.run_dir, 1)])
    np.testing.assert_allclose(advantages, (rewards - rewards.mean()) / rewards.std(), atol=1e-5)


def test_a_critic_that_cannot_read_the_actor_is_refused_before_training(tmp_path):
    tiny_sections(tmp_path)  # writes the model's folder
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    for key, value, rule in (
        ("vocab_size", 50, "50 token ids, and the actor's tokenizer has 97"),
        ("max_position_embeddings", 8, "reads at most 8 tokens"),
    ):
        other = tmp_path / key
        other.mkdir()
        (other / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ConfigError, match=rule) as caught:
            train(tmp_path, run={"name": key}, model={"random_weights": True}, critic={"path": str(other)})
        assert caught.value.key == "critic.path"
