"""PPO on two ranks, the critic sequence parallel, the actor sharded: the numbers of one rank, also after a resume."""

import os
from pathlib import Path

import pytest
import torch
from rank_group import run_placed
from safetensors.torch import load_file
from test_schedules_meshes import assert_equal_metrics, compared, run_one, sections_of

from paceline.telemetry.records import read_ledger, summarise

PPO = {
    "algorithm": {"name": "ppo", "kl_coefficient": 0.05, "kl_placement": "reward"},
    "task": {"eval_size": 0},
    # eps of the gradients' size, as in the actor's
    "critic": {"lr": 1e-3, "eps": 1e-3, "num_epochs": 2, "pretrain_steps": 1},
    "batch": {"mini_batch_prompts": 2},
}
DEPENDS_ON_LAYOUT = ("critic/micro_batches", "critic/tokens", "critic/memory", "critic/batch", "batch/")


@pytest.fixture(autouse=True)
def rewards_are_importable(monkeypatch):
    paths = [str(Path(__file__).parents[1] / "model"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def metrics(run_dir):
    return {
        step: {name: value for name, value in values.items() if not name.startswith(DEPENDS_ON_LAYOUT)}
        for step, values in compared(run_dir).items()
    }


def test_two_ranks_have_every_metric_of_one_and_their_checkpoint_goes_on_on_one(tmp_path):
    one = Path(run_one(sections_of(tmp_path, "one", **PPO, run={"num_steps": 3})))
    divided = {**PPO, "critic": {**PPO["critic"], "sequence_parallel_size": 2}}
    two, _ = run_placed(2, run_one, sections_of(tmp_path, "two", **divided, cluster={"num_devices": 2}))
    expected = metrics(one)
    assert_equal_metrics(metrics(two), {step: expected[step] for step in (1, 2)})
    for ledger in read_ledger(Path(two)):
        stages = summarise(ledger)["stages"]
        assert {"values", "update_critic", "ref_logprob", "update_actor"} <= stages.keys()
    run_one(sections_of(tmp_path, "two", **PPO, run={"num_steps": 3}))
    assert_equal_metrics(metrics(two), expected)
    for group in ("masters", "critic_masters"):
        files = [Path(run) / "checkpoints" / "step_3" / f"{group}.safetensors" for run in (one, two)]
        wanted, found = (load_file(file) for file in files)
        assert wanted.keys() == found.keys()
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
