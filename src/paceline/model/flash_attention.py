"""Packed attention by variable-length kernels: independent sequences, or a tree of shared prefixes.

Every segment attends causally to itself in one launch. In a tree, the descendants of a shared segment also see all of
it: one more launch per depth, merged by log-sum-exp. A prefix's keys are therefore read, and its queries computed,
once for all samples that share it.

Shapes: T tokens of the row, H query heads, K kv heads, D head width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from paceline.batching.prefixes import Segment, join_only_children
from paceline.model.attention import AttentionArgs, AttentionPlan
from paceline.model.flash_kernels import Ranges, VarlenKernel
from paceline.model.transfer import to_device


@dataclass(frozen=True, slots=True)
class SharedKeys:
    """Queries (rows of the packed row) that see shared segments' keys whole."""

    query_rows: Tensor
    key_rows: Tensor
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class TreeRanges:
    """The launches of one row: every segment by itself, then the shared segments by depth."""

    own: Ranges
    shared: tuple[SharedKeys, ...]


class FlashPlan:
    """Attention of a packed row on `kernel`. Layers it cannot serve (float32, exact mode, a soft cap, a window in a
    tree, heads not a multiple of 8 wide) go to `fallback`, which gives the same result."""

    def __init__(
        self, segments: Sequence[Segment], kernel: VarlenKernel, fallback: AttentionPlan, device: torch.device
    ) -> None:
        self._kernel, self._fallback = kernel, fallback
        self._tree = tree_ranges(segments, device)

    def attend(self, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, args: AttentionArgs) -> Tensor:
        if not self._kernel_applies(query_BHTD, args):
            return self._fallback.attend(query_BHTD, key_BKTD, value_BKTD, args)
        out_THD: Tensor = _TreeAttention.apply(
            # a squeeze, not an index: the backward pass of an index fills a tensor of zeros
            query_BHTD.squeeze(0).transpose(0, 1),
            key_BKTD.squeeze(0).transpose(0, 1),
            value_BKTD.squeeze(0).transpose(0, 1),
            self._tree,
            self._kernel,
            args.scaling,
            args.window,
        )
        return out_THD.unsqueeze(0)

    def _kernel_applies(self, query_BHTD: Tensor, args: AttentionArgs) -> bool:
        half = query_BHTD.dtype in (torch.bfloat16, torch.float16)
        window_fits = args.window is None or not self._tree.shared
        return (
            half and not args.exact and args.softcap is None and window_fits and query_BHTD.shape[-1] % 8 == 0
        )


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        tree: TreeRanges,
        kernel: VarlenKernel,
        scale: float,
        window: int | None,
    ) -> Tensor:
        out_THD, lse_HT = kernel.forward(query_THD, key_TKD, value_TKD, tree.own, scale, window)
        if tree.shared and _get_current_dispatch_mode() is not None:
            # selective recomputation keeps the kernel's own results, which the merge must not write over
            out_THD, lse_HT = out_THD.clone(), lse_HT.clone()
        for part in tree.shared:
            rows, keys = part.query_rows, part.key_rows
            shared_out, shared_lse = kernel.forward(
                query_THD[rows], key_TKD[keys], value_TKD[keys], part.ranges, scale, None
            )
            own_lse = lse_HT[:, rows]
            lse = torch.logaddexp(own_lse, shared_lse)
            weight_own = (own_lse - lse).exp().T.unsqueeze(-1)
            weight_shared = (shared_lse - lse).exp().T.unsqueeze(-1)
            merged = out_THD[rows].float() * weight_own + shared_out.float() * weight_shared
            out_THD[rows] = merged.to(out_THD.dtype)
            lse_HT[:, rows] = lse
        ctx.save_for_backward(query_THD, key_TKD, value_TKD, out_THD, lse_HT)
        ctx.tree, ctx.kernel, ctx.scale, ctx.window = tree, kernel, scale, window
        return out_THD

    @staticmethod
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        kernel: VarlenKernel = ctx.kernel
        grad_query, grad_key, grad_value = kernel.backward(
            grad_THD, query, key, value, out, lse, ctx.tree.own, ctx.scale, ctx.window
        )
        for part in ctx.tree.shared:
            rows, keys = part.query_rows, part.key_rows
            found = kernel.backward(
                grad_THD[rows],
                query[rows],
                key[keys],
                value[keys],
                out[rows],
                lse[:, rows].contiguous(),
                part.ranges,
                ctx.scale,
                None,
            )
            grad_query[rows] += found[0]  # no row occurs twice: a token has one ancestor at each depth
            grad_key[keys] += found[1]
            grad_value[keys] += found[2]
        return grad_query, grad_key, grad_value, None, None, None, None


def tree_ranges(segments: Sequence[Segment], device: torch.device) -> TreeRanges:
    """Launches for `segments`, which stand in row order with every segment right before its descendants."""
    segments = join_only_children(segments)
    ends = [segment.start + segment.length for segment in segments]
    longest = max(segment.length for segment in segments)
    offsets = _offsets([segment.length for segment in segments], device)
    own = Ranges(offsets, offsets, longest, longest, causal=True)
    depth = [0] * len(segments)
    last_descendant = list(range(len(segments)))
    for index, segment in enumerate(segments):
        if segment.parent >= 0:
            depth[index] = depth[segment.parent] + 1
        ancestor = segment.parent
        while ancestor >= 0:
            last_descendant[ancestor] = index
            ancestor = segments[ancestor].parent
    shared = []
    for level in range(max(depth)):
        parents = [i for i in range(len(segments)) if depth[i] == level and last_descendant[i] > i]
        queries = [(ends[i], ends[last_descendant[i]]) for i in parents]
        keys = [(segments[i].start, ends[i]) for i in parents]
        shared.append(_shared_keys(queries, keys, device))
    return TreeRanges(own, tuple(shared))


def _shared_keys(
    queries: Sequence[tuple[int, int]], keys: Sequence[tuple[int, int]], device: torch.device
) -> SharedKeys:
    lengths_q = [end - start for start, end in queries]
    lengths_k = [end - start for start, end in keys]
    ranges = Ranges(
        _offsets(lengths_q, device), _offsets(lengths_k, device), max(lengths_q), max(lengths_k), causal=False
    )
    return SharedKeys(_rows(queries, device), _rows(keys, device), ranges)


def _rows(ranges: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    return to_device(torch.cat([torch.arange(start, end) for start, end in ranges]), device)


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
