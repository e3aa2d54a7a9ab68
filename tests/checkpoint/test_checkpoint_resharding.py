"""Case 33: a sharded optimiser saved on 4 ranks goes on, on 4, 2, 8 or 1, exactly where it was."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rank_group import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from paceline.checkpoint import CheckpointStore
from paceline.config.parallelism import MeshSizes
from paceline.config.schema import TrainSection
from paceline.engine.mesh import RankMesh
from paceline.engine.optimizer import MasterAdamW
from paceline.engine.shards import full_tensor
from paceline.schedules.saving import load_optimizer, pieces

NUM_UPDATES = 100
NUM_ROWS = 16
SETTINGS = TrainSection(lr=1e-6, lr_schedule="linear", weight_decay=0.1)


def toy() -> tuple[nn.Module, MasterAdamW, RankMesh]:
    """A bfloat16 model with float32 masters, sharded where there are ranks; sizes that the ranks do not divide."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1)).to(torch.bfloat16)
    if not dist.is_initialized():
        return model, MasterAdamW(dict(model.named_parameters()), SETTINGS, NUM_UPDATES), RankMesh.single()
    mesh = RankMesh.from_process_group(MeshSizes(shard=dist.get_world_size()), "cpu")
    model = model.float()
    fully_shard(
        model,
        mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)
    return model, MasterAdamW(dict(model.named_parameters()), SETTINGS, NUM_UPDATES, mesh=mesh), mesh


def update(model: nn.Module, optimizer: MasterAdamW, mesh: RankMesh, index: int) -> tuple[float, float]:
    """One update on the rows of `index`, each rank its own; (learning rate, loss over all)."""
    rows = torch.randn(NUM_ROWS, 6, generator=torch.Generator().manual_seed(index))
    own = rows[mesh.rank :: mesh.world_size].to(torch.bfloat16)
    loss = (model(own).float() - own.float().sum(-1, keepdim=True)).square().sum() / NUM_ROWS
    loss.backward()
    return optimizer.step().lr, float(mesh.sum(loss.detach()))


def whole_state(optimizer: MasterAdamW) -> dict[str, np.ndarray]:
    tensors = optimizer.masters() | optimizer.moments()
    return {name: full_tensor(tensor).numpy().copy() for name, tensor in tensors.items()}


def save_at_40(folder: str) -> dict[str, Any]:
    model, optimizer, mesh = toy()
    for index in range(40):
        update(model, optimizer, mesh, index)
    store = CheckpointStore(folder, keep=1, ranks=mesh)
    tensors = {"masters": pieces(optimizer.masters()), "moments": pieces(optimizer.moments())}
    store.save(40, tensors, {"optimizer": optimizer.state()}, asynchronous=True)
    state = whole_state(optimizer)
    unbroken = [update(model, optimizer, mesh, index) for index in range(40, 45)]
    store.wait()
    return {"state": state, "unbroken": unbroken, "after": whole_state(optimizer)}


def resume_at_40(folder: str) -> dict[str, Any]:
    model, optimizer, mesh = toy()
    store = CheckpointStore(folder, keep=1, ranks=mesh)
    found = store.latest()
    assert found is not None
    loaded = store.load(found.path)
    load_optimizer(optimizer, loaded, "", loaded.state["optimizer"])
    state = whole_state(optimizer)
    continued = [update(model, optimizer, mesh, index) for index in range(40, 45)]
    return {"state": state, "continued": continued, "after": whole_state(optimizer)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(4, save_at_40, str(folder))[0]


@pytest.mark.parametrize("num_ranks", [4, 2, 8, 1])
def test_masters_and_moments_are_bit_equal_and_updates_equal_an_unbroken_run(saved, num_ranks):
    folder, before = saved
    resumed = (
        resume_at_40(str(folder)) if num_ranks == 1 else run_ranks(num_ranks, resume_at_40, str(folder))[0]
    )
    assert set(resumed["state"]) == set(before["state"]) and len(before["state"]) == 12
    for name, tensor in before["state"].items():
        np.testing.assert_array_equal(resumed["state"][name], tensor, name)
    assert resumed["continued"][0][0] == pytest.approx(6e-7, rel=1e-12)
    if num_ranks == 4:
        assert resumed["continued"] == before["unbroken"]
        for name, tensor in before["after"].items():
            np.testing.assert_array_equal(resumed["after"][name], tensor, name)
    for (rate, loss), (expected_rate, expected_loss) in zip(
        resumed["continued"], before["unbroken"], strict=True
    ):
        assert rate == expected_rate and loss == pytest.approx(expected_loss, rel=1e-3)  # bf16 sums by rank
