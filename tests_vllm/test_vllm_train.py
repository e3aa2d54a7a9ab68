"""Whole runs of `paceline train` whose rollouts come from vLLM: in a process of its own, and as a server."""

import json
import os
import signal
from pathlib import Path

import pytest
from small_models import write_small_model
from tiny_runs import tiny_sections, write_prompts

from paceline.config import ConfigError, load_config
from paceline.schedules.recorder import Recorder
from paceline.schedules.training import run_training

ROOT = Path(__file__).parent.parent


@pytest.fixture
def train(tmp_path, python, monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT / "tests" / "model"), os.environ.get("PYTHONPATH", "")])
    )
    write_small_model(tmp_path / "model")
    write_prompts(tmp_path / "prompts.jsonl")

    def run(batch=None, lora=None, **settings):
        vllm = {
            "python": python,
            "enforce_eager": True,
            "kv_cache_gb": 0.05,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 512,
            "verify_logprobs": "every",
            **settings,
        }
        sections = tiny_sections(
            tmp_path,
            run={"num_steps": 2},
            batch=batch or {},
            lora=lora or {},
            rollout={"engine": "vllm", "vllm": vllm},
        )
        result = run_training(load_config(sections=sections))
        lines = (result.run_dir / "metrics.jsonl").read_text().splitlines()
        return result, [json.loads(line)["metrics"] for line in lines]

    return run


def steps(rows):
    return [row for row in rows if "rollout/logprob_difference_max" in row]


@pytest.mark.parametrize("mode", ["child", "server"])
def test_two_steps_train_on_what_vllm_sampled_with_the_trainers_weights(train, mode):
    result, rows = train(mode=mode)
    assert result.summary["status"] == "completed"
    assert [row["weight_version"] for row in steps(rows)] == [1, 2]
    assert max(row["rollout/logprob_difference_max"] for row in steps(rows)) < 1e-3
    assert all(row["tokens/response"] > 0 and row["rollout/prefill_tokens"] > 0 for row in steps(rows))
    features = json.loads((result.run_dir / "env.json").read_text())["features"]
    assert features["rollout_engine"] == "vllm" and features["rollout_vllm"]


def test_adapters_reach_vllm_merged(train):
    """Case 30 (c)."""
    pytest.importorskip("peft")
    _, rows = train(lora={"rank": 4})
    assert max(row["rollout/logprob_difference_max"] for row in steps(rows)) < 1e-3


def test_several_updates_per_rollout_recompute_the_old_logprobs(train):
    result, _ = train(batch={"mini_batch_prompts": 2})
    assert result.summary["old_logprob"]["source"] == "recompute"


def test_a_killed_vllm_is_started_anew_and_the_run_goes_on(train, monkeypatch):
    killed = []
    record = Recorder.rollout

    def kill_once(self, *arguments):
        record(self, *arguments)
        if not killed:
            killed.append(self._run.engine.replicas["0"].pid)
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(Recorder, "rollout", kill_once)
    result, rows = train()
    assert result.summary["status"] == "completed"
    assert max(row["rollout/logprob_difference_max"] for row in steps(rows)) < 1e-3
    assert sum(row["rollout/dead_replicas"] for row in steps(rows)) == 1


def test_a_python_without_vllm_is_refused_before_anything_is_started(train):
    with pytest.raises(ConfigError, match=r"rollout.vllm.python = '/usr/bin/false'.*"):
        train(python="/usr/bin/false")
