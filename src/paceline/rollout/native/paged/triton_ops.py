"""Launchers of `triton_kernels.py`. Imported only where Triton is installed (`kernels.py`)."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from paceline.model.attention import AttentionArgs
from paceline.model.fused.elementwise import HeadLayout
from paceline.rollout.native.paged import triton_kernels
from paceline.rollout.native.paged.attention import DecodeRows, LayerPages
from paceline.rollout.native.paged.device import DeviceRows

_SAMPLING_BLOCK = 4096
_MAX_SPLITS = 16
_PROGRAMS_PER_MULTIPROCESSOR = 4


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Keys that a program of the decoding kernel reads at a time, its warps, and the reads it has under way."""

    block: int = 64
    num_warps: int = 4
    num_stages: int = 3


class TritonDecode:
    """Split-KV attention of one query per sequence over pages. Splits follow from the shapes alone, so that a captured
    round may be replayed for any lengths."""

    name = "triton split-kv"

    def __init__(self, num_multiprocessors: int, tile: DecodeTile | None = None) -> None:
        self._num_multiprocessors, self._tile = num_multiprocessors, tile or DecodeTile()

    def __call__(self, query_RHD: Tensor, cache: LayerPages, rows: DecodeRows, args: AttentionArgs) -> Tensor:
        num_rows, num_heads, head_dim = query_RHD.shape
        _, page_tokens, num_kv_heads, _ = cache.keys.shape
        block = min(self._tile.block, page_tokens)
        assert query_RHD.is_contiguous() and cache.keys.is_contiguous() and cache.values.is_contiguous()
        assert rows.page_table_RP.is_contiguous() and page_tokens % block == 0
        splits = self.num_splits(num_rows * num_kv_heads, rows.longest, block)
        out_RHD = torch.empty_like(query_RHD)
        parts, lse = out_RHD, out_RHD
        if splits > 1:
            parts = query_RHD.new_empty(num_rows, splits, num_heads, head_dim, dtype=torch.float32)
            lse = query_RHD.new_empty(num_rows, splits, num_heads, dtype=torch.float32)
        triton_kernels.decode_kernel[(num_rows, num_kv_heads, splits)](
            query_RHD,
            cache.keys,
            cache.values,
            rows.page_table_RP,
            rows.lengths_R,
            parts,
            lse,
            rows.page_table_RP.shape[1],
            args.scaling,
            args.softcap or 1.0,
            H=num_heads,
            K=num_kv_heads,
            D=head_dim,
            PAGE=page_tokens,
            WINDOW=args.window or 0,
            HAS_SOFTCAP=args.softcap is not None,
            GROUP=max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
            SPLITS=splits,
            BLOCK=block,
            num_warps=self._tile.num_warps,
            num_stages=self._tile.num_stages,
        )
        if splits > 1:
            triton_kernels.merge_kernel[(num_rows, num_heads)](
                parts,
                lse,
                out_RHD,
                H=num_heads,
                D=head_dim,
                SPLITS=splits,
                SLOTS=triton.next_power_of_2(splits),
                num_warps=1,
            )
        return out_RHD

    def num_splits(self, num_programs: int, longest: int, block: int) -> int:
        """Parts of a sequence: enough programs to fill the device, no part shorter than four blocks."""
        wanted = -(-_PROGRAMS_PER_MULTIPROCESSOR * self._num_multiprocessors // num_programs)
        return max(1, min(wanted, longest // (4 * block), _MAX_SPLITS))


def rotate_and_store(
    qkv_RN: Tensor,
    query_weight_D: Tensor | None,
    key_weight_D: Tensor | None,
    cos_RD: Tensor,
    sin_RD: Tensor,
    layout: HeadLayout,
    pages: LayerPages,
    rows: DeviceRows,
) -> Tensor:
    """Queries [R, H, D], normed and rotated; keys, likewise, and values go straight to their pages."""
    assert qkv_RN.is_contiguous() and cos_RD.is_contiguous() and sin_RD.is_contiguous()
    assert pages.keys.is_contiguous() and pages.values.is_contiguous()
    num_rows = len(qkv_RN)
    query_RHD = qkv_RN.new_empty(num_rows, layout.num_heads, layout.head_dim)
    triton_kernels.rotate_store_kernel[(num_rows,)](
        qkv_RN,
        qkv_RN if query_weight_D is None else query_weight_D,
        qkv_RN if key_weight_D is None else key_weight_D,
        cos_RD,
        sin_RD,
        rows.page_table_RP,
        rows.positions_R,
        query_RHD,
        pages.keys,
        pages.values,
        rows.page_table_RP.shape[1],
        layout.norm_eps,
        H=layout.num_heads,
        K=layout.num_kv_heads,
        D=layout.head_dim,
        PAGE=pages.keys.shape[1],
        HAS_NORM=query_weight_D is not None,
        HEADS=triton.next_power_of_2(layout.num_heads + layout.num_kv_heads),
        VALUE_COLS=triton.next_power_of_2(layout.num_kv_heads * layout.head_dim),
        num_warps=4,
    )
    return query_RHD


def draw_tokens(
    logits_RV: Tensor, rows: DeviceRows, last_tokens_S: Tensor, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Token and log-prob for each row (int64, float32), and the token into its slot's entry of `last_tokens_S`.

    Inverse-CDF sampling in blocks of the vocabulary: the logits are read once for the blocks' masses, then only the
    block in which the number falls.
    """
    assert logits_RV.is_contiguous()
    num_rows, num_cols = logits_RV.shape
    num_blocks = triton.cdiv(num_cols, _SAMPLING_BLOCK)
    highest, mass = logits_RV.new_empty(2, num_rows, num_blocks, dtype=torch.float32)
    tokens_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    logprobs_R = torch.empty(num_rows, dtype=torch.float32, device=logits_RV.device)
    common = {"HAS_SOFTCAP": softcap is not None, "BLOCK": _SAMPLING_BLOCK, "num_warps": 8}
    triton_kernels.block_mass_kernel[(num_rows, num_blocks)](
        logits_RV, rows.temperatures_R, highest, mass, num_cols, num_blocks, softcap or 1.0, **common
    )
    triton_kernels.pick_kernel[(num_rows,)](
        logits_RV,
        rows.temperatures_R,
        highest,
        mass,
        rows.seeds_R,
        rows.counts_R,
        rows.slots_R,
        tokens_R,
        logprobs_R,
        last_tokens_S,
        num_cols,
        num_blocks,
        softcap or 1.0,
        BLOCKS=triton.next_power_of_2(num_blocks),
        **common,
    )
    return tokens_R, logprobs_R
