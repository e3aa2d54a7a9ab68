"""Whole runs whose rollouts come from native engines in processes of their own."""

import json
import os
import signal
from pathlib import Path

import pytest
from tiny_runs import tiny_sections

from paceline.config import ConfigError, load_config
from paceline.rollout.errors import ReplicaDiedError
from paceline.rollout.router.router import ReplicaRouter
from paceline.schedules.engine_setup import device_names
from paceline.schedules.recorder import Recorder
from paceline.schedules.training import run_training


@pytest.fixture(autouse=True)
def rewards_importable(monkeypatch):
    folder = str(Path(__file__).parent.parent / "model")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))


def samples(run_dir):
    return [
        (row["prompt_id"], row["sample_index"], row["completion"], row["weight_version"])
        for path in sorted((run_dir / "samples").glob("*.jsonl"))
        for row in map(json.loads, path.read_text().splitlines())
    ]


def metrics(run_dir):
    return [json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def train(tmp_path, name, **rollout):
    sections = tiny_sections(
        tmp_path,
        run={"name": name, "num_steps": 2},
        task={"eval_size": 0},
        rollout={"max_new_tokens": 6, **rollout},
    )
    return run_training(load_config(sections=sections)).run_dir


def test_two_replicas_sample_what_the_trainers_own_engine_samples_and_a_killed_one_changes_nothing(
    tmp_path, monkeypatch
):
    alone = train(tmp_path, "alone")
    pids = []
    add = Recorder.rollout

    def kill_one_after_the_first_rollout(self, *arguments):
        add(self, *arguments)
        router = self._run.engine
        assert isinstance(router, ReplicaRouter)
        if not pids:
            pids.append(router.replicas["1"].pid)
            os.kill(pids[0], signal.SIGKILL)

    monkeypatch.setattr(Recorder, "rollout", kill_one_after_the_first_rollout)
    together = train(tmp_path, "together", num_replicas=2)
    assert samples(together) == samples(alone)
    assert [row["weight_version"] for row in metrics(together) if "weight_version" in row][-1] == 2
    assert [row["rollout/dead_replicas"] for row in metrics(together) if "rollout/dead_replicas" in row] == [
        0,
        1,
    ]
    assert max(row.get("rollout/logprob_difference_max", 0) for row in metrics(together)) < 1e-3


def test_a_run_whose_only_replicas_cannot_start_names_worker_and_stage(tmp_path):
    with pytest.raises(ReplicaDiedError, match=r"rollout worker 0, stage setup"):
        train(tmp_path, "late", num_replicas=2, replicas={"start_timeout_s": 0.2})


def test_more_memory_than_the_machine_has_is_refused_before_anything_is_waited_for(tmp_path):
    with pytest.raises(
        ConfigError, match=r"rollout.num_replicas = 64: .* GiB, and this machine has"
    ) as caught:
        train(tmp_path, "much", num_replicas=64, kv_cache_gb=1000.0)
    assert caught.value.nearest


def test_devices_that_are_not_there_are_refused_before_anything_is_waited_for(tmp_path):
    with pytest.raises(
        ConfigError, match=r"rollout.replicas.devices = \[6000, 6001\]: this machine shows \d+ devices"
    ):
        train(tmp_path, "absent", num_replicas=2, replicas={"devices": (6000, 6001)})


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, ("1", "0")), ("", ("1", "0")), ("4,6", ("6", "4")), ("GPU-a, GPU-b", ("GPU-b", "GPU-a"))],
)
def test_devices_that_this_process_sees_keep_their_identity_in_others(monkeypatch, visible, names):
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_names([1, 0]) == names
