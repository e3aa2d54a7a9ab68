"""Rollouts recorded once and replayed: training sees the same input bit for bit, and nothing is sampled or scored."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import tiny_sections

from paceline.config import ConfigError, dump_config, load_config
from paceline.rollout.recording import ReplayError, recorded_steps
from paceline.schedules import run_training
from paceline.telemetry.metrics import read_metrics

TESTS = Path(__file__).parents[1]
NOT_ABOUT_TRAINING = (
    "time/",
    "throughput/",
    "memory/",
    "tflops/",
    "mfu/",
    "checkpoint/",
    "rollout/",
    "eval/",
)


@pytest.fixture(autouse=True)
def rewards_are_importable(monkeypatch):
    paths = [str(TESTS / "model"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def train(tmp_path, name, rollout, **changes):
    sections = tiny_sections(tmp_path, rollout=rollout, **changes)
    sections["run"]["name"] = name
    return run_training(load_config(None, sections=sections)).run_dir


def learned(run_dir):
    return {
        record.step: {n: v for n, v in record.metrics.items() if not n.startswith(NOT_ABOUT_TRAINING)}
        for record in read_metrics(run_dir)
    }


def tensors(run_dir, step=3):
    folder = run_dir / "checkpoints" / f"step_{step}"
    return {
        (name, key): tensor
        for name in ("masters", "moments")
        for key, tensor in load_file(folder / f"{name}.safetensors").items()
    }


def assert_same_updates(first, second):
    assert learned(first) == learned(second)
    ours, theirs = tensors(first), tensors(second)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch": {"mini_batch_prompts": 2, "num_epochs": 2}},
        {"algorithm": {"dynamic_sampling": True, "max_generations": 3}},
        {"algorithm": {"kl_coefficient": 0.05, "kl_placement": "reward"}, "task": {"eval_size": 0}},
    ],
    ids=["several updates", "dynamic sampling", "kl in the reward"],
)
def test_a_replayed_run_makes_the_recorded_runs_updates_bit_for_bit(tmp_path, changes):
    recording = str(tmp_path / "recording")
    recorded = train(tmp_path, "recorded", {"max_new_tokens": 6, "record": recording}, **changes)
    replayed = train(tmp_path, "replayed", {"max_new_tokens": 6, "replay": recording}, **changes)
    assert recorded_steps(Path(recording)) == [1, 2, 3]
    assert_same_updates(recorded, replayed)


def test_a_replay_neither_samples_nor_scores(tmp_path):
    recording = str(tmp_path / "recording")
    first = train(tmp_path, "recorded", {"max_new_tokens": 6, "record": recording})
    again = train(tmp_path, "replayed", {"max_new_tokens": 6, "replay": recording})
    for step, (recorded, replayed) in enumerate(zip(read_metrics(first), read_metrics(again), strict=True)):
        if not step:
            assert recorded.metrics == replayed.metrics  # the evaluation before training samples in both
            continue
        assert recorded.metrics["rollout/prefill_tokens"] > 0 == replayed.metrics["rollout/prefill_tokens"]
        assert "time/reward" in recorded.metrics and "time/reward" not in replayed.metrics
        assert recorded.metrics["tokens/response"] == replayed.metrics["tokens/response"]
    rows = [(run / "samples" / "step3.jsonl").read_text() for run in (first, again)]
    assert rows[0] == rows[1]


def test_a_recording_keeps_everything_a_sample_and_its_verdict_have(tmp_path):
    recording = tmp_path / "recording"
    train(tmp_path, "recorded", {"max_new_tokens": 6, "record": str(recording)}, run={"num_steps": 1})
    lines = [json.loads(line) for line in (recording / "step1.jsonl").read_text().splitlines()]
    assert len(lines) == 4 and all(len(line["samples"]) == len(line["verdicts"]) == 4 for line in lines)
    sample, verdict = lines[0]["samples"][0], lines[0]["verdicts"][0]
    assert len(sample["token_ids"]) == len(sample["logprobs"]) == len(sample["loss_mask"]) > 0
    assert {"seed", "weight_version", "token_versions", "finish_reason", "text"} <= sample.keys()
    assert verdict["outcome"] == "score" and verdict["score"] is not None


def test_a_recorded_run_that_is_killed_and_resumed_records_each_step_once(tmp_path):
    recording = tmp_path / "recording"
    rollout = {"max_new_tokens": 6, "record": str(recording)}
    train(tmp_path, "r", rollout, run={"num_steps": 2})
    before = (recording / "step1.jsonl").read_text()
    train(tmp_path, "r", rollout, run={"num_steps": 3})
    assert recorded_steps(recording) == [1, 2, 3]
    assert (recording / "step1.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("run.seed", {"run": {"num_steps": 2, "seed": 5}}),
        ("run.num_steps", {"run": {"num_steps": 4}}),
        ("rollout.max_new_tokens", {"rollout": {"max_new_tokens": 5}}),
        ("rollout.temperature", {"rollout": {"max_new_tokens": 6, "temperature": 0.5}}),
        ("rollout.replay", {"rollout": {"max_new_tokens": 6, "replay": "elsewhere"}}),
        ("rollout.replay", {"rollout": {"max_new_tokens": 6, "record": "elsewhere"}}),
    ],
)
def test_a_replay_under_other_settings_is_refused_before_training(tmp_path, key, changes):
    recording = str(tmp_path / "recording")
    train(tmp_path, "recorded", {"max_new_tokens": 6, "record": recording}, run={"num_steps": 2})
    changes = {"run": {"num_steps": 2}, **changes}
    rollout = {"max_new_tokens": 6, "replay": recording, **changes.pop("rollout", {})}
    with pytest.raises(ConfigError) as refused:
        train(tmp_path, "replayed", rollout, **changes)
    assert refused.value.key == key


def test_a_sample_that_was_not_recorded_ends_the_run_with_its_name(tmp_path):
    recording = str(tmp_path / "recording")
    train(tmp_path, "recorded", {"max_new_tokens": 6, "record": recording}, run={"num_steps": 1})
    with pytest.raises(ReplayError, match=r"step 1: prompt .* with seed \d+ is not in"):
        train(
            tmp_path,
            "replayed",
            {"max_new_tokens": 6, "replay": recording},
            run={"num_steps": 1},
            batch={"num_prompts": 5, "num_samples": 4, "token_budget": 256},
        )
    (prompts := tmp_path / "prompts.jsonl").write_text(prompts.read_text().replace(" w7", " w8"))
    with pytest.raises(ReplayError):
        train(tmp_path, "other prompts", {"max_new_tokens": 6, "replay": recording}, run={"num_steps": 1})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_replay_what_one_rank_recorded(tmp_path):
    """Samples are found by prompt and seed, so the number of ranks may differ; sums in another order may round."""
    recording = str(tmp_path / "recording")
    settings = {"run": {"num_steps": 2}, "task": {"eval_size": 0}, "train": {"lr": 1e-3, "eps": 1e-3}}
    recorded = train(tmp_path, "recorded", {"max_new_tokens": 6, "record": recording}, **settings)
    sections = tiny_sections(
        tmp_path,
        rollout={"max_new_tokens": 6, "replay": recording},
        cluster={"num_devices": 2},
        **settings,
    )
    sections["run"]["name"] = "on-two"
    path = tmp_path / "on-two.yaml"
    path.write_text(dump_config(load_config(None, sections=sections)))
    command = [sys.executable, "-m", "paceline", "train", str(path)]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    ours, theirs = learned(recorded), learned(tmp_path / "runs" / "on-two")
    for step in (1, 2):
        for name in ("reward/mean", "tokens/response", "loss/total", "grad_norm"):
            assert theirs[step][name] == pytest.approx(ours[step][name], rel=1e-4, abs=1e-6)
