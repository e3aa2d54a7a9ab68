"""Weights that wait on the host while their model is not used, so that the device's memory is the others'."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from paceline.model.loading import CausalModel


def move_to_host(model: CausalModel) -> None:
    """Weights and buffers go to the host; `model.device` stays the one it computes on."""
    module: nn.Module = model.module
    module.to("cpu")
    if model.device.type == "cuda":
        torch.cuda.empty_cache()  # or the allocator would keep what others are to use


@contextmanager
def on_device(model: CausalModel) -> Iterator[None]:
    """Weights kept on the host are on the model's device inside."""
    module: nn.Module = model.module
    module.to(model.device)
    try:
        yield
    finally:
        move_to_host(model)
