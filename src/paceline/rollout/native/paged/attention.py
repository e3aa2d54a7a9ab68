"""Attention over pages: one interface, several kernels, and which of them a device gets.

Shapes: R rows, T tokens of the prefill row, C chunks, H query heads, K kv heads, D head width, P pages of the longest
sequence, S tokens of a page, N pages of the pool.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.model.attention import AttentionArgs, additive_bias, attend_dense, attend_sequences
from paceline.model.exact_attention import attend_exact


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's keys and values, [N, S, K, D] each."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """R sequences of `lengths_R` tokens (the new one included), int32 on the device. `longest` bounds them, so that the
    host need not ask; rows that only fill a batch up have length 1 on the scratch page."""

    page_table_RP: Tensor
    lengths_R: Tensor
    longest: int


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """C chunks: queries [offsets_C[c], offsets_C[c + 1]) of the row are the last of sequence c's `lengths_C[c]` tokens.

    `spans` says the same on the host: (first row, number of queries, length of the sequence).
    """

    offsets_C: Tensor
    page_table_CP: Tensor
    lengths_C: Tensor
    longest_query: int
    spans: tuple[tuple[int, int, int], ...]


class PagedAttention(Protocol):
    """Attention of queries against pages in which their own keys and values are stored already."""

    name: str

    def decode(self, query_RHD: Tensor, cache: LayerPages, rows: DecodeRows, args: AttentionArgs) -> Tensor:
        """One query per sequence, [R, H, D]."""
        ...

    def prefill(
        self, query_THD: Tensor, cache: LayerPages, chunks: PrefillChunks, args: AttentionArgs
    ) -> Tensor:
        """Causal queries of all chunks, [T, H, D]."""
        ...


class GatheringAttention:
    """Copies the pages of every sequence together and attends densely: any device, the reference for the kernels."""

    name = "gather"

    def decode(self, query_RHD: Tensor, cache: LayerPages, rows: DecodeRows, args: AttentionArgs) -> Tensor:
        keys_RKCD, values_RKCD = (
            _gather(pages, rows.page_table_RP, rows.longest) for pages in (cache.keys, cache.values)
        )
        if args.exact:
            out_RH1D = attend_exact(
                query_RHD[:, :, None],
                keys_RKCD,
                values_RKCD,
                rows.lengths_R[:, None] - 1,
                scale=args.scaling,
                window=args.window,
                softcap=args.softcap,
            )
            return out_RH1D.squeeze(2)
        num_rows, num_heads, head_dim = query_RHD.shape
        num_kv_heads = keys_RKCD.shape[1]
        # the query heads of one kv head become its queries: same mask for all, no repeated keys
        query_RKGD = query_RHD.view(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        distance_RC = rows.lengths_R[:, None] - 1 - torch.arange(rows.longest, device=query_RHD.device)
        bias_R11C = _bias(distance_RC, args.window, query_RHD.dtype)[:, None, None]
        out_RKGD = attend_dense(query_RKGD, keys_RKCD, values_RKCD, bias_R11C, False, args)
        return out_RKGD.reshape(num_rows, num_heads, head_dim)

    def prefill(
        self, query_THD: Tensor, cache: LayerPages, chunks: PrefillChunks, args: AttentionArgs
    ) -> Tensor:
        outputs = []
        for chunk, (start, num_queries, length) in enumerate(chunks.spans):
            pages_1P = chunks.page_table_CP[chunk : chunk + 1]
            keys_1KCD, values_1KCD = (
                _gather(pages, pages_1P, length) for pages in (cache.keys, cache.values)
            )
            query_1HQD = query_THD[start : start + num_queries].transpose(0, 1)[None]
            if args.exact:
                out_1HQD = attend_sequences(query_1HQD, keys_1KCD, values_1KCD, length - num_queries, args)
                outputs.append(out_1HQD[0].transpose(0, 1))
                continue
            positions_Q = torch.arange(length - num_queries, length, device=query_THD.device)
            distance_QC = positions_Q[:, None] - torch.arange(length, device=query_THD.device)
            bias_QC = _bias(distance_QC, args.window, query_THD.dtype)
            out_1HQD = attend_dense(query_1HQD, keys_1KCD, values_1KCD, bias_QC, False, args)
            outputs.append(out_1HQD[0].transpose(0, 1))
        return torch.cat(outputs)


def gather_tokens(pages_NSKD: Tensor, chunks: PrefillChunks) -> Tensor:
    """All sequences' tokens one behind the other, [sum of lengths, K, D]."""
    size = pages_NSKD.shape[1]
    parts = [
        pages_NSKD[chunks.page_table_CP[row, : -(-length // size)].long()].flatten(0, 1)[:length]
        for row, (_, _, length) in enumerate(chunks.spans)
    ]
    return torch.cat(parts)


def _bias(distance: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    return additive_bias(visible, dtype)


def _gather(pages_NSKD: Tensor, page_table_RP: Tensor, length: int) -> Tensor:
    """The first `length` tokens of every sequence, [R, K, C, D]."""
    num_pages = -(-length // pages_NSKD.shape[1])
    found_RPSKD = pages_NSKD[page_table_RP[:, :num_pages].long()]
    return found_RPSKD.flatten(1, 2)[:, :length].transpose(1, 2)
