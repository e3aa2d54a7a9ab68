"""Variable-length attention kernels of libraries, behind one interface that also hands out the log-sum-exp.

With the log-sum-exp, attention over several sets of keys can be computed set by set and merged, and each set's
backward pass can be run with the merged output and log-sum-exp (Dao et al. 2022, FlashAttention, appendix B.4).

Shapes: T query tokens, S key tokens, H query heads, K kv heads, D head width, N sequences.
"""

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ranges:
    """N independent sequences: queries [offsets_q[n], offsets_q[n + 1]) attend to keys [offsets_k[n], ...).

    Offsets are int32 on the device, lengths are those of the longest sequence.
    """

    offsets_q: Tensor
    offsets_k: Tensor
    longest_q: int
    longest_k: int
    causal: bool


class VarlenKernel(Protocol):
    """Attention of many sequences in one launch, heads grouped."""

    name: str

    def forward(
        self,
        query_THD: Tensor,
        key_SKD: Tensor,
        value_SKD: Tensor,
        ranges: Ranges,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor]:
        """(output [T, H, D], log-sum-exp of the scaled scores, float32 [H, T])."""
        ...

    def backward(
        self,
        grad_THD: Tensor,
        query_THD: Tensor,
        key_SKD: Tensor,
        value_SKD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        ranges: Ranges,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, key and value, given the output and log-sum-exp over all keys a query sees."""
        ...


class FlashAttention4:
    """The `flash-attn-4` package (CuTe): Hopper and Blackwell, kv heads not repeated."""

    name = "flash-attn-4"

    def __init__(self) -> None:
        self.interface = _flash_attention_4()

    def forward(
        self,
        query_THD: Tensor,
        key_SKD: Tensor,
        value_SKD: Tensor,
        ranges: Ranges,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor]:
        found = self.interface._flash_attn_fwd(
            query_THD,
            key_SKD,
            value_SKD,
            cu_seqlens_q=ranges.offsets_q,
            cu_seqlens_k=ranges.offsets_k,
            max_seqlen_q=ranges.longest_q,
            max_seqlen_k=ranges.longest_k,
            softmax_scale=scale,
            causal=ranges.causal and window is None,
            window_size_left=None if window is None else window - 1,
            window_size_right=None if window is None else 0,
            return_lse=True,
        )
        return found[0], found[1]

    def backward(
        self,
        grad_THD: Tensor,
        query_THD: Tensor,
        key_SKD: Tensor,
        value_SKD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        ranges: Ranges,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        found = self.interface._flash_attn_bwd(
            query_THD,
            key_SKD,
            value_SKD,
            out_THD,
            grad_THD,
            lse_HT,
            softmax_scale=scale,
            causal=ranges.causal and window is None,
            window_size_left=None if window is None else window - 1,
            window_size_right=None if window is None else 0,
            cu_seqlens_q=ranges.offsets_q,
            cu_seqlens_k=ranges.offsets_k,
            max_seqlen_q=ranges.longest_q,
            max_seqlen_k=ranges.longest_k,
        )
        return found[0], found[1], found[2]


class TorchFlash:
    """FlashAttention 2 as torch carries it; kv heads are repeated for it."""

    name = "torch-flash"

    def forward(
        self,
        query_THD: Tensor,
        key_SKD: Tensor,
        value_SKD: Tensor,
        ranges: Ranges,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor]:
        repeats = query_THD.shape[1] // key_SKD.shape[1]
        found = torch.ops.aten._flash_attention_forward(
            query_THD,
            key_SKD.repeat_interleave(repeats, dim=1),
            value_SKD.repeat_interleave(repeats, dim=1),
            ranges.offsets_q,
            ranges.offsets_k,
            ranges.longest_q,
            ranges.longest_k,
            0.0,
            ranges.causal,
            False,
            scale=scale,
            **_torch_window(window),
        )
        return found[0], found[1]

    def backward(
        self,
        grad_THD: Tensor,
        query_THD: Tensor,
        key_SKD: Tensor,
        value_SKD: Tensor,
        out_THD: Tensor,
        lse_HT: Tensor,
        ranges: Ranges,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_kv_heads = key_SKD.shape[1]
        repeats = query_THD.shape[1] // num_kv_heads
        no_dropout = torch.empty(0, dtype=torch.uint64, device=query_THD.device)
        grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
            grad_THD.contiguous(),
            query_THD,
            key_SKD.repeat_interleave(repeats, dim=1),
            value_SKD.repeat_interleave(repeats, dim=1),
            out_THD,
            lse_HT,
            ranges.offsets_q,
            ranges.offsets_k,
            ranges.longest_q,
            ranges.longest_k,
            0.0,
            ranges.causal,
            no_dropout,
            no_dropout,
            scale=scale,
            **_torch_window(window),
        )
        return (
            grad_query,
            grad_key.unflatten(1, (num_kv_heads, repeats)).sum(dim=2),
            grad_value.unflatten(1, (num_kv_heads, repeats)).sum(dim=2),
        )


def _torch_window(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


@functools.cache
def varlen_kernel(device_type: str, capability: tuple[int, int] | None) -> VarlenKernel | None:
    """The kernel for a device: FlashAttention 4 on Hopper and later where it is installed, torch's own on CUDA of
    capability 8.0 and later, none elsewhere. Chosen once; env.json names it."""
    if device_type != "cuda" or capability is None or capability < (8, 0):
        return None
    if capability >= (9, 0) and importlib.util.find_spec("flash_attn") and _has_cute():
        return FlashAttention4()
    return TorchFlash()


def kernel_for(device: torch.device) -> VarlenKernel | None:
    """`varlen_kernel` of a device."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return varlen_kernel(device.type, capability)


def _has_cute() -> bool:
    """FlashAttention 4 and its compiler; the older flash-attn packages share the top name."""
    return bool(importlib.util.find_spec("flash_attn.cute") and importlib.util.find_spec("cutlass"))


def _flash_attention_4() -> ModuleType:
    # by name: an optional package without types
    return importlib.import_module("flash_attn.cute.interface")
