"""Attention plans: which token attends to which, for each layout, behind one function in transformers' registry.

The Hugging Face module computes queries, keys and values; the function registered here hands them to the
`AttentionPlan` that travels with the forward call (`paceline_plan=...`). A plan is built once per forward pass and
shared by all layers.

Shapes: B rows, T tokens of a row, H query heads, K kv heads, D head width, Q/C queries and keys of one block.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from paceline.model.cpu_attention import attend_cpu, matmul_backward_applies
from paceline.model.exact_attention import attend_exact

ATTENTION_NAME = "paceline"
EXACT_ATTENTION_NAME = "paceline_exact"
"""The same attention with `AttentionArgs.exact`."""

_HARMLESS = frozenset({"position_ids", "use_cache", "output_attentions", "is_causal", "output_router_logits"})


class UnsupportedAttentionError(ValueError):
    """The model asks its attention for something no plan provides; naming it beats a silently wrong result."""


@dataclass(frozen=True, slots=True)
class AttentionArgs:
    """What one layer adds to the plan: score scale, window in tokens (None = all) and logit soft cap. `exact`: every
    query's result must be the same bits whatever is computed beside it (`exact_attention.py`)."""

    layer: int
    scaling: float
    window: int | None
    softcap: float | None
    exact: bool = False


class AttentionPlan(Protocol):
    """Computes attention for one layout."""

    def attend(self, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, args: AttentionArgs) -> Tensor:
        """Returns the attention output, shape [B, T, H, D]."""
        ...


def _registered_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paceline_plan: AttentionPlan | None = None,
    paceline_exact: bool = False,
    **extra: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls in every layer; see `AttentionPlan` for the shapes.

    Raises:
        UnsupportedAttentionError: no plan was given, or the model passes an argument that would be ignored.
    """
    if paceline_plan is None:
        raise UnsupportedAttentionError("the forward call carries no attention plan (paceline_plan=...)")
    ignored = sorted(name for name, given in extra.items() if given is not None and name not in _HARMLESS)
    if ignored or attention_mask is not None or dropout:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} passes {ignored or 'a mask or dropout'} to its attention; no plan covers it"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = module.layer_idx
    assert isinstance(layer, int)
    args = AttentionArgs(layer, scale, sliding_window, softcap, paceline_exact)
    return paceline_plan.attend(query, key, value, args), None


def register_attention() -> None:
    """Makes `attn_implementation="paceline"` known to transformers. Safe to call more than once.

    No mask function is registered on purpose: transformers then builds no mask, the plan is the mask.
    """
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _registered_attention)
    exact = partial(_registered_attention, paceline_exact=True)
    ALL_ATTENTION_FUNCTIONS.register(EXACT_ATTENTION_NAME, exact)


def attend_dense(
    query_BHQD: Tensor,
    key_BKCD: Tensor,
    value_BKCD: Tensor,
    bias: Tensor | None,
    causal: bool,
    args: AttentionArgs,
) -> Tensor:
    """Attention with an additive `bias` broadcastable to [B, 1, Q, C], or plain causal; returns [B, H, Q, D].

    Soft-capped scores (Gemma 2) have no fused kernel and take the explicit path.
    """
    grouped = query_BHQD.shape[1] != key_BKCD.shape[1]
    one_mask = causal if bias is None else bias.dim() == 2
    if args.softcap is None and one_mask and matmul_backward_applies(query_BHQD, key_BKCD):
        return attend_cpu(query_BHQD, key_BKCD, value_BKCD, bias, args.scaling)
    if args.softcap is None:
        return F.scaled_dot_product_attention(
            query_BHQD,
            key_BKCD,
            value_BKCD,
            attn_mask=bias,
            is_causal=causal,
            scale=args.scaling,
            enable_gqa=grouped,
        )
    if grouped:
        repeats = query_BHQD.shape[1] // key_BKCD.shape[1]
        key_BKCD = key_BKCD.repeat_interleave(repeats, dim=1)
        value_BKCD = value_BKCD.repeat_interleave(repeats, dim=1)
    scores_BHQC = (query_BHQD @ key_BKCD.transpose(-1, -2)).float() * args.scaling
    scores_BHQC = args.softcap * torch.tanh(scores_BHQC / args.softcap)
    if causal:
        num_queries, num_keys = scores_BHQC.shape[-2:]
        above = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores_BHQC.device).triu(1)
        scores_BHQC = scores_BHQC.masked_fill(above, float("-inf"))
    if bias is not None:
        scores_BHQC = scores_BHQC + bias.float()
    return scores_BHQC.softmax(dim=-1).to(value_BKCD.dtype) @ value_BKCD


def attend_sequences(
    query_BHQD: Tensor, key_BKCD: Tensor, value_BKCD: Tensor, first_position: int, args: AttentionArgs
) -> Tensor:
    """Exact causal attention of queries that begin at `first_position` of their sequences; returns [B, H, Q, D]."""
    positions_Q = torch.arange(query_BHQD.shape[2], device=query_BHQD.device) + first_position
    return attend_exact(
        query_BHQD,
        key_BKCD,
        value_BKCD,
        positions_Q.expand(len(query_BHQD), -1),
        scale=args.scaling,
        window=args.window,
        softcap=args.softcap,
    )


def additive_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where `visible`, -inf elsewhere, in the dtype of the scores' operands."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, float("-inf")
    )


class PaddedPlan:
    """Batch x length with padding on the right: a causal query never sees the padding after it."""

    def __init__(self, length: int, device: torch.device) -> None:
        self._positions_T = torch.arange(length, device=device)
        self._biases: dict[tuple[int, torch.dtype], Tensor] = {}

    def attend(self, query_BHTD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, args: AttentionArgs) -> Tensor:
        if args.exact:
            out_BHTD = attend_sequences(query_BHTD, key_BKTD, value_BKTD, 0, args)
        elif args.window is None or args.window >= len(self._positions_T):
            out_BHTD = attend_dense(query_BHTD, key_BKTD, value_BKTD, None, True, args)
        else:
            bias = self._window_bias(args.window, query_BHTD.dtype)
            out_BHTD = attend_dense(query_BHTD, key_BKTD, value_BKTD, bias, False, args)
        return out_BHTD.transpose(1, 2)

    def _window_bias(self, window: int, dtype: torch.dtype) -> Tensor:
        key = (window, dtype)
        if key not in self._biases:
            distance = self._positions_T[:, None] - self._positions_T[None, :]
            self._biases[key] = additive_bias((distance >= 0) & (distance < window), dtype)
        return self._biases[key]
