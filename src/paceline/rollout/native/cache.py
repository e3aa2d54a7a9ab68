"""KV cache of the native engine: one slot per running sample, running samples always in the first slots.

Shapes: N layers, S slots, R running samples, T tokens of a prefill row, H query heads, K kv heads, C capacity of a
slot in tokens, D head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.model.attention import AttentionArgs, AttentionPlan, additive_bias, attend_dense


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Sizes of one token's keys and values over all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class SlotCache:
    """Keys and values in dense slots, [N, 2, S, K, C, D]."""

    def __init__(self, layout: KVLayout, num_slots: int, capacity: int) -> None:
        self.layout, self.num_slots, self.capacity = layout, num_slots, capacity
        size = (layout.num_layers, 2, num_slots, layout.num_kv_heads, capacity, layout.head_dim)
        # zeros: a masked position still meets a weight of 0, and 0 times an uninitialised NaN is NaN
        self.data = torch.zeros(size, dtype=layout.dtype, device=layout.device)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self.data.numel() * self.data.element_size()

    def move(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` tokens of a slot over another slot."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def grown(self, num_slots: int, capacity: int) -> "SlotCache":
        """A copy with at least as many slots and tokens per slot."""
        larger = SlotCache(self.layout, num_slots, capacity)
        larger.data[:, :, : self.num_slots, :, : self.capacity] = self.data
        return larger


@dataclass(frozen=True, slots=True)
class PrefillTarget:
    """Tokens [start, start + length) of the row belong at `offset` of each of the slots [first, last)."""

    start: int
    length: int
    offset: int
    first_slot: int
    last_slot: int


class PrefillPlan:
    """Attention of a packed row of prompts that also stores its keys and values in the slots they belong to."""

    def __init__(self, inner: AttentionPlan, cache: SlotCache, targets: Sequence[PrefillTarget]) -> None:
        self._inner, self._cache, self._targets = inner, cache, targets

    def attend(self, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, args: AttentionArgs) -> Tensor:
        keys_SKCD, values_SKCD = self._cache.data[args.layer]
        for t in self._targets:
            row = slice(t.start, t.start + t.length)
            place = (slice(t.first_slot, t.last_slot), slice(None), slice(t.offset, t.offset + t.length))
            keys_SKCD[place] = key_BKTD[:, :, row]
            values_SKCD[place] = value_BKTD[:, :, row]
        return self._inner.attend(query_BHTD, key_BKTD, value_BKTD, args)


class DecodePlan:
    """One new token per running sample against its slot; the row holds the R tokens side by side."""

    def __init__(self, cache: SlotCache, positions: Sequence[int]) -> None:
        self._cache = cache
        device = cache.layout.device
        self._num_running = len(positions)
        self._length = max(positions) + 1
        self._positions_R = torch.tensor(positions, device=device)
        self._rows_R = torch.arange(self._num_running, device=device)
        self._biases: dict[int | None, Tensor] = {}

    def attend(self, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, args: AttentionArgs) -> Tensor:
        keys_SKCD, values_SKCD = self._cache.data[args.layer]
        keys_SKCD[self._rows_R, :, self._positions_R] = key_BKTD[0].transpose(0, 1)
        values_SKCD[self._rows_R, :, self._positions_R] = value_BKTD[0].transpose(0, 1)
        num_heads, head_dim = query_BHTD.shape[1], query_BHTD.shape[3]
        num_kv_heads = key_BKTD.shape[1]
        # the query heads of one kv head become its queries: same mask for all, no repeated keys
        query_RKGD = query_BHTD[0].transpose(0, 1).view(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
        visible = slice(0, self._num_running), slice(None), slice(0, self._length)
        bias_R11C = self._bias(args.window, query_RKGD.dtype)
        out_RKGD = attend_dense(query_RKGD, keys_SKCD[visible], values_SKCD[visible], bias_R11C, False, args)
        return out_RKGD.reshape(1, self._num_running, num_heads, head_dim)

    def _bias(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._biases:
            distance_RC = self._positions_R[:, None] - torch.arange(
                self._length, device=self._positions_R.device
            )
            visible_RC = distance_RC >= 0
            if window is not None:
                visible_RC &= distance_RC < window
            self._biases[window] = additive_bias(visible_RC, dtype)[:, None, None, :]
        return self._biases[window]
