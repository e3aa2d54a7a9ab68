"""Which kernels a device's rounds run on. Chosen once per engine; env.json names the attention.

Shapes as in `attention.py`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from paceline.model.attention import AttentionArgs
from paceline.model.flash_kernels import FlashAttention4, Ranges, VarlenKernel, kernel_for
from paceline.model.fused.elementwise import HeadLayout
from paceline.model.triton_support import has_triton
from paceline.rollout.native.paged import device as reference
from paceline.rollout.native.paged.attention import (
    DecodeRows,
    GatheringAttention,
    LayerPages,
    PagedAttention,
    PrefillChunks,
    gather_tokens,
)
from paceline.rollout.native.paged.device import DeviceRows

Decode = Callable[[Tensor, LayerPages, DecodeRows, AttentionArgs], Tensor]

FLASH_PAGE_TOKENS = 128
"""What FlashAttention 4 fetches in one copy; other sizes take its slower path."""

_FLASH_HEAD_DIMS = (64, 128)
"""Head widths whose tiles of keys are a page long on Hopper. At 256 they are shorter, and the slower path then reads
its page numbers into an array of no entries (flash-attn-4 4.0.0b18)."""

_FLASH_MIN_SEQUENCES = 24
"""Below this many sequences FlashAttention 4, which does not split one on Hopper, leaves multiprocessors idle."""


class RotateAndStore(Protocol):
    """See `triton_ops.rotate_and_store`."""

    def __call__(
        self,
        qkv_RN: Tensor,
        query_weight_D: Tensor | None,
        key_weight_D: Tensor | None,
        cos_RD: Tensor,
        sin_RD: Tensor,
        layout: HeadLayout,
        pages: LayerPages,
        rows: DeviceRows,
    ) -> Tensor: ...


class DrawTokens(Protocol):
    """See `triton_ops.draw_tokens`."""

    def __call__(
        self, logits_RV: Tensor, rows: DeviceRows, last_tokens_S: Tensor, softcap: float | None
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class RoundKernels:
    """What a decoding round needs beside matrix products. `rotate_and_store` is None where it has no kernel: then the
    model's own layers run, on a `PagedPlan`."""

    attention: PagedAttention
    draw: DrawTokens
    rotate_and_store: RotateAndStore | None
    page_tokens: int


class FlashPaged:
    """FlashAttention 4 on pages of 128 tokens; few long sequences decode on the split-KV kernel instead."""

    name = "flash-attn-4 paged, triton split-kv below 24 sequences"

    def __init__(self, interface: ModuleType, few: Decode) -> None:
        self._interface, self._few, self._fallback = interface, few, GatheringAttention()

    def decode(self, query_RHD: Tensor, cache: LayerPages, rows: DecodeRows, args: AttentionArgs) -> Tensor:
        if args.exact:
            return self._fallback.decode(query_RHD, cache, rows, args)
        if len(query_RHD) < _FLASH_MIN_SEQUENCES or not _is_half(query_RHD, args):
            return self._few(query_RHD, cache, rows, args)
        found = self._interface._flash_attn_fwd(
            query_RHD[:, None],
            cache.keys,
            cache.values,
            seqused_k=rows.lengths_R,
            page_table=rows.page_table_RP,
            max_seqlen_k=rows.longest,
            softmax_scale=args.scaling,
            softcap=args.softcap,
            window_size_left=None if args.window is None else args.window - 1,
            window_size_right=None if args.window is None else 0,
        )
        return found[0].squeeze(1)

    def prefill(
        self, query_THD: Tensor, cache: LayerPages, chunks: PrefillChunks, args: AttentionArgs
    ) -> Tensor:
        if not _is_half(query_THD, args):
            return self._fallback.prefill(query_THD, cache, chunks, args)
        found = self._interface._flash_attn_fwd(
            query_THD,
            cache.keys,
            cache.values,
            cu_seqlens_q=chunks.offsets_C,
            seqused_k=chunks.lengths_C,
            page_table=chunks.page_table_CP,
            max_seqlen_q=chunks.longest_query,
            max_seqlen_k=max(length for _, _, length in chunks.spans),
            softmax_scale=args.scaling,
            softcap=args.softcap,
            causal=args.window is None,
            window_size_left=None if args.window is None else args.window - 1,
            window_size_right=None if args.window is None else 0,
        )
        return found[0]


class SplitPaged:
    """Triton's split-KV kernel for decoding; prefill gathers its pages for a variable-length kernel."""

    def __init__(self, decode: Decode, varlen: VarlenKernel | None) -> None:
        self._decode, self._varlen, self._fallback = decode, varlen, GatheringAttention()
        self.name = "triton split-kv, gathered prefill on " + ("torch" if varlen is None else varlen.name)

    def decode(self, query_RHD: Tensor, cache: LayerPages, rows: DecodeRows, args: AttentionArgs) -> Tensor:
        if args.exact:
            return self._fallback.decode(query_RHD, cache, rows, args)
        return self._decode(query_RHD, cache, rows, args)

    def prefill(
        self, query_THD: Tensor, cache: LayerPages, chunks: PrefillChunks, args: AttentionArgs
    ) -> Tensor:
        if self._varlen is None or args.softcap is not None or not _is_half(query_THD, args):
            return self._fallback.prefill(query_THD, cache, chunks, args)
        lengths = [length for _, _, length in chunks.spans]
        key_SKD, value_SKD = (gather_tokens(pages, chunks) for pages in (cache.keys, cache.values))
        offsets = torch.nn.functional.pad(chunks.lengths_C.cumsum(0, dtype=torch.int32), (1, 0))
        ranges = Ranges(chunks.offsets_C, offsets, chunks.longest_query, max(lengths), causal=True)
        return self._varlen.forward(query_THD, key_SKD, value_SKD, ranges, args.scaling, args.window)[0]


def _is_half(query: Tensor, args: AttentionArgs) -> bool:
    """Whether library kernels serve this call: 16-bit, heads a multiple of 8 wide, not exact."""
    return query.dtype in (torch.bfloat16, torch.float16) and query.shape[-1] % 8 == 0 and not args.exact


def flash_takes(capability: tuple[int, int], head_dim: int, page_tokens: int) -> bool:
    """Whether FlashAttention 4 reads pages of this form in whole copies; its other ways are not used. Capabilities
    8 and 12 have no pages there."""
    is_page_a_tile = page_tokens == FLASH_PAGE_TOKENS and head_dim in _FLASH_HEAD_DIMS
    return is_page_a_tile and capability[0] in (9, 10, 11)


def round_kernels(device: torch.device, head_dim: int, page_tokens: int | None = None) -> RoundKernels:
    """The kernels for a device: on CUDA Triton's, with FlashAttention 4 for attention where it is installed; plain
    torch elsewhere."""
    if device.type != "cuda" or not has_triton() or head_dim < 16 or head_dim & (head_dim - 1):
        return RoundKernels(GatheringAttention(), reference.draw_tokens, None, page_tokens or 16)
    # by name, because the module defines kernels on import and cannot be imported without Triton
    ops = importlib.import_module("paceline.rollout.native.paged.triton_ops")
    decode: Decode = ops.TritonDecode(torch.cuda.get_device_properties(device).multi_processor_count)
    varlen = kernel_for(device)
    attention: PagedAttention = SplitPaged(decode, varlen)
    page_tokens = page_tokens or FLASH_PAGE_TOKENS
    capability = torch.cuda.get_device_capability(device)
    if isinstance(varlen, FlashAttention4) and flash_takes(capability, head_dim, page_tokens):
        attention = FlashPaged(varlen.interface, decode)
    return RoundKernels(attention, ops.draw_tokens, ops.rotate_and_store, page_tokens)
