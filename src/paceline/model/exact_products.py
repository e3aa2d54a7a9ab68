"""Matrix products whose every row is the same bits whatever stands in the other rows, and however many there are.

Libraries choose a product's kernel, and with it the order of its sums, by its shape. Here every product has one shape:
rows are taken in tiles of a fixed number, the last one filled up with zeros. Within one shape the order of a row's sums
depends neither on its place nor on the other rows, which `tests/model/test_model_exact.py` checks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_TILE_ROWS = {"cpu": 32, "cuda": 256}


def product_in_tiles(inputs: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """`inputs @ weight^T + bias` for inputs [..., K], tile by tile."""
    rows_RK = inputs.reshape(-1, inputs.shape[-1])
    num_rows, tile = len(rows_RK), _TILE_ROWS[inputs.device.type]
    filled_RK = F.pad(rows_RK, (0, 0, 0, -num_rows % tile))
    # contiguous: a product of a transposed operand takes another kernel
    parts = [F.linear(part.contiguous(), weight_NK, bias_N) for part in filled_RK.split(tile)]
    found = torch.cat(parts) if parts else rows_RK.new_empty(0, len(weight_NK))
    return found[:num_rows].view(*inputs.shape[:-1], len(weight_NK))


class _TiledLinear:
    """Forward of one linear layer; asks the layer for its weight at every call, because sharding replaces it."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer

    def __call__(self, inputs: Tensor) -> Tensor:
        return product_in_tiles(inputs, self._layer.weight, self._layer.bias)


def use_tiled_products(module: nn.Module) -> int:
    """Lets every linear layer of a module multiply tile by tile. Returns how many there are."""
    layers = [layer for layer in module.modules() if type(layer) is nn.Linear]
    for layer in layers:
        layer.forward = _TiledLinear(layer)  # type: ignore[method-assign, assignment]
    return len(layers)
