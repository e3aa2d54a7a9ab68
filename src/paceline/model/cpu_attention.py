"""Attention on the CPU with a gradient: the fused forward kernel, and a backward pass made of matrix products.

PyTorch's fused CPU backward runs without the processor's matrix units and takes most of an attention's time for pieces
of a few hundred tokens; five plain products do the same work faster. Scores are formed in float32, as the fused kernel
does, so that probabilities keep their precision under bfloat16.

With S = scale * Q K^T + bias, P = exp(S - logsumexp S), O = P V (Dao et al. 2022):
    dV = P^T dO,  dP = dO V^T,  dS = P * (dP - rowsum(dO * O)),  dQ = scale * dS K,  dK = scale * dS^T Q

Shapes: B rows, H query heads, K kv heads, G = H / K, Q/C queries and keys, D head width.
"""

from typing import Any

import torch
from torch import Tensor

MAX_SCORES = 1 << 23
"""Scores (B x H x Q x C) up to which they are held at once in the backward pass: 32 MiB in float32."""


def matmul_backward_applies(query_BHQD: Tensor, key_BKCD: Tensor) -> bool:
    """Whether this attention needs a gradient on a CPU and is small enough to hold its scores."""
    num_scores = query_BHQD.shape[0] * query_BHQD.shape[1] * query_BHQD.shape[2] * key_BKCD.shape[2]
    needs_gradient = torch.is_grad_enabled() and (query_BHQD.requires_grad or key_BKCD.requires_grad)
    return query_BHQD.device.type == "cpu" and needs_gradient and num_scores <= MAX_SCORES


def attend_cpu(
    query_BHQD: Tensor, key_BKCD: Tensor, value_BKCD: Tensor, bias_QC: Tensor | None, scale: float
) -> Tensor:
    """Attention output [B, H, Q, D]; `bias_QC` is additive, None means causal over equally many queries and keys."""
    out: Tensor = _CpuAttention.apply(query_BHQD, key_BKCD, value_BKCD, bias_QC, scale)
    return out


class _CpuAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float
    ) -> Tensor:
        out, lse_BHQ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, bias is None, attn_mask=bias, scale=scale
        )
        ctx.save_for_backward(query, key, value, bias, out, lse_BHQ)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out_BHQD: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, bias, out, lse_BHQ = ctx.saved_tensors
        num_kv_heads, num_keys = key.shape[1], key.shape[2]
        batch, num_heads, num_queries, head_dim = query.shape
        rows = (batch, num_kv_heads, num_heads // num_kv_heads * num_queries)
        # the G query heads of one kv head become G * Q queries of it: no key is repeated
        query_BKRD = query.reshape(*rows, head_dim)
        grad_BKRD = grad_out_BHQD.reshape(*rows, head_dim)
        scores_BHQC = (query_BKRD.float() @ key.float().transpose(-1, -2)).view(
            batch, num_heads, num_queries, num_keys
        )
        scores_BHQC.mul_(ctx.scale)
        if bias is None:
            above = torch.ones(num_queries, num_keys, dtype=torch.bool).triu_(1)
            scores_BHQC.masked_fill_(above, float("-inf"))
        else:
            scores_BHQC.add_(bias)
        probs_BHQC = scores_BHQC.sub_(lse_BHQ.unsqueeze(-1)).exp_()
        probs_BKRC = probs_BHQC.view(*rows, num_keys)
        grad_value = probs_BKRC.to(value.dtype).transpose(-1, -2) @ grad_BKRD
        grad_probs_BKRC = (grad_BKRD @ value.transpose(-1, -2)).float()
        delta_BKR1 = (grad_BKRD.float() * out.reshape(*rows, head_dim).float()).sum(dim=-1, keepdim=True)
        grad_scores_BKRC = grad_probs_BKRC.sub_(delta_BKR1).mul_(probs_BKRC).mul_(ctx.scale).to(key.dtype)
        grad_query = (grad_scores_BKRC @ key).view(query.shape)
        grad_key = grad_scores_BKRC.transpose(-1, -2) @ query_BKRD
        return grad_query, grad_key, grad_value, None, None
