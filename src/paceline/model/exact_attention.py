"""Attention whose every query gives the same bits whatever is computed beside it: one query while decoding, or many
while scoring.

Keys are taken in tiles of `TILE` tokens that begin at multiples of it *in the sequence*, queries in tiles of `TILE`
rows, so that every product has one shape (see `exact_products.py`). Sums over keys go through such products, tile after
tile in order; the maximum is exact in any order; a tile that a query does not see adds exact zeros. All in float32.

Shapes: B sequences, H query heads, K kv heads, Q queries, C keys, D head width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 32


def attend_exact(
    query_BHQD: Tensor,
    key_BKCD: Tensor,
    value_BKCD: Tensor,
    positions_BQ: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Causal attention output [B, H, Q, D]; key c stands at position c, query q of sequence b at its `positions_BQ`."""
    num_rows, num_heads, num_queries, head_dim = query_BHQD.shape
    num_kv_heads = key_BKCD.shape[1]
    group = num_heads // num_kv_heads
    key, value = (_key_tiles(part) for part in (key_BKCD, value_BKCD))
    ones = value.new_ones(*value.shape[:-1], 1)
    value = torch.cat([value, ones], dim=-1)  # the last column sums the weights, in the order of the values
    # the query heads of one kv head become its queries
    rows_ZRD = query_BHQD.float().reshape(num_rows * num_kv_heads, group * num_queries, head_dim)
    positions_ZR = positions_BQ[:, None, None].expand(-1, num_kv_heads, group, -1).reshape(len(rows_ZRD), -1)
    missing = -rows_ZRD.shape[1] % TILE
    rows_ZRD = F.pad(rows_ZRD, (0, 0, 0, missing))
    positions_ZR = F.pad(positions_ZR, (0, missing))
    scores = [
        _scores(rows_ZRD, tile, positions_ZR, start * TILE, scale, window, softcap)
        for start, tile in enumerate(key.unbind(1))
    ]
    highest_ZR1 = torch.stack([part.amax(dim=-1) for part in scores]).amax(dim=0).detach()[..., None]
    total_ZRD: Tensor | None = None
    for part_ZRC, value_ZCD in zip(scores, value.unbind(1), strict=True):
        weights_ZRC = (part_ZRC - highest_ZR1).exp()
        added = _product(weights_ZRC, value_ZCD)
        total_ZRD = added if total_ZRD is None else total_ZRD + added
    assert total_ZRD is not None
    out_ZRD = (total_ZRD[..., :head_dim] / total_ZRD[..., head_dim:])[:, : group * num_queries]
    return out_ZRD.reshape(num_rows, num_heads, num_queries, head_dim).to(query_BHQD.dtype)


def _key_tiles(part_BKCD: Tensor) -> Tensor:
    """[B * K, tiles, TILE, D], filled up with zeros."""
    num_rows, num_kv_heads, num_keys, head_dim = part_BKCD.shape
    filled = F.pad(part_BKCD.float(), (0, 0, 0, -num_keys % TILE))
    return filled.reshape(num_rows * num_kv_heads, -1, TILE, head_dim)


def _scores(
    rows_ZRD: Tensor,
    key_ZCD: Tensor,
    positions_ZR: Tensor,
    start: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Scores against one tile of keys, -inf where a query does not see one, [Z, R, TILE]."""
    scores_ZRC = _product(rows_ZRD, key_ZCD.transpose(1, 2).contiguous()) * scale
    if softcap is not None:
        scores_ZRC = softcap * torch.tanh(scores_ZRC / softcap)
    distance_ZRC = positions_ZR[..., None] - torch.arange(start, start + TILE, device=rows_ZRD.device)
    hidden = distance_ZRC < 0 if window is None else (distance_ZRC < 0) | (distance_ZRC >= window)
    return scores_ZRC.masked_fill(hidden, float("-inf"))


def _product(left_ZRA: Tensor, right_ZAB: Tensor) -> Tensor:
    """A batched product of [TILE, A] by [A, B] matrices only: R is cut into tiles, each meets its Z's right side."""
    num, num_rows, inner = left_ZRA.shape
    tiles = num_rows // TILE
    left = left_ZRA.reshape(num * tiles, TILE, inner)
    right = right_ZAB.repeat_interleave(tiles, dim=0) if tiles > 1 else right_ZAB
    return torch.bmm(left, right).view(num, num_rows, right_ZAB.shape[2])
