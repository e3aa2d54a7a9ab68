"""PPO on two ranks through the command line: the numbers of one rank, with a sequence-parallel critic of its own."""

import pytest
import torch
from safetensors.torch import load_file
from test_schedules_ranks import compared, environment, recipe, run_command, samples

from paceline.config import load_config
from paceline.schedules import run_training
from paceline.telemetry.records import read_ledger, summarise

# eps of the gradients' size, as in the actor's
PPO = {
    "algorithm": {"name": "ppo", "kl_coefficient": 0.05, "kl_placement": "reward"},
    "task": {"eval_size": 0},
    "critic": {"lr": 1e-3, "eps": 1e-3, "num_epochs": 2, "pretrain_steps": 1},
    "batch": {"mini_batch_prompts": 2},
    "run": {"num_steps": 2},
}
CRITIC_LAYOUT = ("critic/micro_batches", "critic/tokens", "critic/memory")


def test_two_ranks_have_every_metric_of_one_and_their_checkpoint_goes_on_on_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    one = run_training(load_config(recipe(tmp_path, "one", **PPO), ["run.num_steps=3"])).run_dir
    path = recipe(tmp_path, "two", **PPO)
    on_two = ["cluster.num_devices=2", "cluster.device=cpu", "critic.sequence_parallel_size=2"]
    done = run_command(path, *on_two)
    assert done.returncode == 0, done.stderr
    two = tmp_path / "runs" / "two"
    expected, found = compared(one), compared(two)
    assert list(found) == [1, 2]
    for step in found:
        assert samples(two, step) == samples(one, step)
        for name, value in expected[step].items():
            if name != "rollout/prefill_tokens" and not name.startswith(CRITIC_LAYOUT):
                assert found[step][name] == pytest.approx(value, rel=1e-5, abs=1e-6), (step, name)
    for ledger in read_ledger(two):
        stages = summarise(ledger)["stages"]
        assert {"values", "update_critic", "ref_logprob", "update_actor"} <= stages.keys()
    run_training(load_config(path, ["run.num_steps=3"]))
    mine, wanted = compared(two)[3], expected[3]
    for name in (
        "critic/loss",
        "critic/grad_norm",
        "critic/explained_variance",
        "loss/policy",
        "reward/mean",
    ):
        assert mine[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), name
    for group in ("masters", "critic_masters"):
        files = [folder / "checkpoints" / "step_3" / f"{group}.safetensors" for folder in (one, two)]
        tensors = [load_file(file) for file in files]
        assert tensors[0].keys() == tensors[1].keys()
        for name in tensors[0]:
            torch.testing.assert_close(tensors[1][name], tensors[0][name], rtol=1e-4, atol=1e-5, msg=name)
