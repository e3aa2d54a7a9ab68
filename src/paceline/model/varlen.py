"""Variable-length packed attention on CUDA through `torch.nn.attention.varlen` (FlashAttention 2).

Shapes: T tokens of the row, H query heads, K kv heads, D head width, N sequences.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from paceline.batching.prefixes import Segment
from paceline.model.attention import AttentionArgs, AttentionPlan


def varlen_supports(device: torch.device) -> bool:
    """Whether the kernel exists for the device: CUDA of compute capability 8.0 and later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


class VarlenPlan:
    """Causal attention of independent sequences in one kernel.

    Layers that the kernel cannot serve (float32, a soft cap, heads not a multiple of 8 wide) go to `fallback`, which
    gives the same result.
    """

    def __init__(self, segments: Sequence[Segment], fallback: AttentionPlan, device: torch.device) -> None:
        ends = [segment.start + segment.length for segment in segments]
        self._offsets_N = torch.tensor([0, *ends], dtype=torch.int32, device=device)
        self._longest = max(segment.length for segment in segments)
        self._fallback = fallback

    def attend(self, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, args: AttentionArgs) -> Tensor:
        if not self._kernel_applies(query_BHTD, args):
            return self._fallback.attend(query_BHTD, key_BKTD, value_BKTD, args)
        repeats = query_BHTD.shape[1] // key_BKTD.shape[1]
        query_THD = query_BHTD[0].transpose(0, 1)
        key_THD = key_BKTD[0].transpose(0, 1).repeat_interleave(repeats, dim=1)
        value_THD = value_BKTD[0].transpose(0, 1).repeat_interleave(repeats, dim=1)
        out_THD = varlen_attn(
            query_THD,
            key_THD,
            value_THD,
            self._offsets_N,
            self._offsets_N,
            self._longest,
            self._longest,
            scale=args.scaling,
            window_size=(-1 if args.window is None else args.window - 1, 0),
        )
        assert isinstance(out_THD, Tensor)  # a tuple only when the log-sum-exp is asked for
        return out_THD.unsqueeze(0)

    def _kernel_applies(self, query_BHTD: Tensor, args: AttentionArgs) -> bool:
        half = query_BHTD.dtype in (torch.bfloat16, torch.float16)
        return half and args.softcap is None and query_BHTD.shape[-1] % 8 == 0
