"""New weights for an engine that holds the model's parameters."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


@torch.no_grad()
def copy_weights(module: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies tensors into the parameters of those names, one by one as they come.

    Raises:
        ValueError: the model has no parameter of that name and shape; those before it have been copied.
    """
    parameters = dict(module.named_parameters())
    for name, tensor in weights:
        target = parameters.get(name)
        if target is None or target.shape != tensor.shape:
            raise ValueError(f"{name} {tuple(tensor.shape)} is no parameter of the engine's model")
        target.copy_(tensor)
