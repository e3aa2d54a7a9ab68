"""A resumed optimiser continues bit by bit: masters and moments as saved, the schedule where it was."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline.checkpoint import CheckpointStore
from paceline.config.schema import TrainSection
from paceline.engine.optimizer import MasterAdamW

NUM_UPDATES = 100
SETTINGS = TrainSection(lr=1e-6, lr_schedule="linear", weight_decay=0.1)


def toy_model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def update(model: nn.Module, optimizer: MasterAdamW, index: int) -> tuple[float, float]:
    """One update on the data of `index`; returns (learning rate, loss)."""
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(index)).to(dtype)
    loss: Tensor = (model(inputs) - inputs.sum(-1, keepdim=True)).square().mean()
    loss.backward()
    return optimizer.step().lr, loss.item()


def make(dtype: torch.dtype) -> tuple[nn.Module, MasterAdamW]:
    model = toy_model(dtype)
    return model, MasterAdamW(dict(model.named_parameters()), SETTINGS, NUM_UPDATES)


def full_state(model: nn.Module, optimizer: MasterAdamW) -> dict[str, dict[str, Tensor]]:
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return {"weights": weights, "masters": optimizer.masters(), "moments": optimizer.moments()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_after_a_resume_equal_an_unbroken_run(tmp_path: Path, dtype: torch.dtype) -> None:
    model, optimizer = make(dtype)
    for index in range(40):
        update(model, optimizer, index)
    store = CheckpointStore(tmp_path, keep=1)
    store.save(40, full_state(model, optimizer), {"optimizer": optimizer.state()}, asynchronous=True)
    unbroken = [update(model, optimizer, index) for index in range(40, 45)]
    store.wait()

    resumed, resumed_optimizer = make(dtype)
    found = store.latest()
    assert found is not None
    loaded = store.load(found.path)
    tensors, state = loaded.tensors, loaded.state
    with torch.no_grad():
        for name, parameter in resumed.named_parameters():
            parameter.copy_(tensors["weights"][name])
    resumed_optimizer.load(tensors["masters"], tensors["moments"], state["optimizer"])
    assert [update(resumed, resumed_optimizer, index) for index in range(40, 45)] == unbroken
    assert unbroken[0][0] == pytest.approx(6e-7, rel=1e-12)
    for group, named in full_state(model, optimizer).items():
        for name, tensor in named.items():
            assert torch.equal(full_state(resumed, resumed_optimizer)[group][name], tensor), (group, name)
