"""Matrix products of few rows on a CPU with bfloat16 matrix units, as decoding needs them.

`x W^T` makes oneDNN repack all of W at every call; `(W x^T)^T` repacks the few rows of x instead and takes half the
time at 16 to 128 rows. The result is the same product, rounded as that kernel rounds.
"""

import torch
from torch import Tensor, nn

MAX_ROWS = 256
"""Rows up to which the weight-first product is the faster one."""


def use_weight_first_products(module: nn.Module) -> int:
    """Lets every bias-free bfloat16 linear layer of a CPU module take few rows weight-first when no gradient is asked.

    Returns how many layers were changed.
    """
    num_changed = 0
    for layer in module.modules():
        if not isinstance(layer, nn.Linear) or layer.bias is not None:
            continue
        if layer.weight.dtype == torch.bfloat16 and layer.weight.device.type == "cpu":
            layer.forward = _WeightFirst(layer)
            num_changed += 1
    return num_changed


def use_stock_products(module: nn.Module) -> None:
    """Takes `use_weight_first_products` back."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            vars(layer).pop("forward", None)


class _WeightFirst:
    """Forward of one linear layer; asks the layer for its weight at every call, because sharding replaces it."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer

    def __call__(self, inputs: Tensor) -> Tensor:
        return linear_few_rows(inputs, self._layer.weight)


def linear_few_rows(inputs: Tensor, weight_NK: Tensor) -> Tensor:
    """`inputs @ weight^T` for inputs [..., K], the fast way round where that applies."""
    num_rows = inputs.numel() // inputs.shape[-1]
    if torch.is_grad_enabled() or num_rows > MAX_ROWS or weight_NK.dtype != torch.bfloat16:
        return nn.functional.linear(inputs, weight_NK)
    product_NR = torch.mm(weight_NK, inputs.reshape(num_rows, -1).T)
    return product_NR.T.contiguous().view(*inputs.shape[:-1], -1)
