"""The log-prob head with the vocabulary split over tensor-parallel ranks, in chunks, without full logits anywhere.

With w_r the share of probability mass on rank r's part of the vocabulary, p_r the distribution within it, and z_r the
log-sum-exp of its logits:
    log w_r = z_r - logsumexp_r(z_r)
    logprob = log p_r(y) + log w_r                          for the rank r that holds y
    entropy = sum_r w_r * (entropy(p_r) - log w_r)
so one exchange of three numbers per token suffices, and nothing cancels where one token has all the mass.

Shapes: R response tokens, C tokens of a chunk, V the rank's part of the vocabulary, E hidden size, S ranks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.model.logprob_head import HeadSettings, scaled_logits
from paceline.model.parallel.groups import Peers


def split_response_logprobs(
    hidden_RE: Tensor,
    weight_VE: Tensor,
    bias_V: Tensor | None,
    targets_R: Tensor,
    settings: HeadSettings,
    peers: Peers,
    vocabulary: int,
) -> tuple[Tensor, Tensor]:
    """`response_logprobs` with this rank's rows of the weight; the result is equal on all ranks of `peers`.

    `hidden_RE` and `targets_R` are the same on all of them; targets are ids of the whole `vocabulary`.
    """
    start = vocabulary_start(vocabulary, peers)
    logprob_R, entropy_R = _SplitHead.apply(hidden_RE, weight_VE, bias_V, targets_R - start, settings, peers)
    return logprob_R, entropy_R


def vocabulary_start(vocabulary: int, peers: Peers) -> int:
    """First id of this rank's part, cut as `torch.chunk` and DTensor cut: all parts but the last ones are full."""
    return min(vocabulary, peers.index * -(-vocabulary // peers.size))


class _SplitHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RE: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        local_targets_R: Tensor,
        settings: HeadSettings,
        peers: Peers,
    ) -> tuple[Tensor, Tensor]:
        own_3R = hidden_RE.new_zeros((3, len(local_targets_R)), dtype=torch.float32)
        for begin in range(0, len(local_targets_R), settings.chunk):
            rows = slice(begin, begin + settings.chunk)
            logits_CV = scaled_logits(hidden_RE[rows], weight_VE, bias_V, settings)
            own_3R[:, rows] = _own_part(logits_CV, local_targets_R[rows])
        gathered_S3R = torch.stack(_gather(own_3R, peers))
        lse_R = gathered_S3R[:, 0].logsumexp(dim=0)
        log_mass_SR = gathered_S3R[:, 0] - lse_R
        # every rank but the target's holds -inf there
        logprob_R = (gathered_S3R[:, 1] + log_mass_SR).max(dim=0).values
        mass_SR = log_mass_SR.exp()
        entropy_R = (mass_SR * gathered_S3R[:, 2] + torch.special.entr(mass_SR)).sum(dim=0)
        ctx.save_for_backward(hidden_RE, weight_VE, bias_V, local_targets_R, lse_R, logprob_R, entropy_R)
        ctx.settings, ctx.peers = settings, peers
        if not settings.with_entropy_grad:
            ctx.mark_non_differentiable(entropy_R)
        return logprob_R, entropy_R

    @staticmethod
    def backward(ctx: Any, grad_logprob_R: Tensor, grad_entropy_R: Tensor) -> tuple[Tensor | None, ...]:
        hidden_RE, weight_VE, bias_V, local_targets_R, lse_R, logprob_R, entropy_R = ctx.saved_tensors
        settings: HeadSettings = ctx.settings
        grad_hidden_RE = torch.zeros_like(hidden_RE)
        # float32 sums over chunks: the result must not depend on how many there are
        grad_weight_VE = torch.zeros_like(weight_VE, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        grad_bias_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for begin in range(0, len(local_targets_R), settings.chunk):
            rows = slice(begin, begin + settings.chunk)
            logits_CV = scaled_logits(hidden_RE[rows], weight_VE, bias_V, settings)
            grad_CV = _logit_gradient(
                logits_CV,
                local_targets_R[rows],
                lse_R[rows],
                logprob_R[rows],
                entropy_R[rows],
                grad_logprob_R[rows],
                grad_entropy_R[rows] if settings.with_entropy_grad else None,
                settings,
            )
            if grad_bias_V is not None:
                grad_bias_V += grad_CV.sum(dim=0)
            grad_CV = grad_CV.to(weight_VE.dtype)
            grad_hidden_RE[rows] = grad_CV @ weight_VE
            if grad_weight_VE is not None:
                grad_weight_VE += grad_CV.T @ hidden_RE[rows]
        dist.all_reduce(grad_hidden_RE, group=ctx.peers.group)
        return (
            grad_hidden_RE,
            None if grad_weight_VE is None else grad_weight_VE.to(weight_VE.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            None,
            None,
            None,
        )


def _own_part(logits_CV: Tensor, local_targets_C: Tensor) -> Tensor:
    """Log-sum-exp, log-prob of the target within this part (-inf where it is elsewhere) and entropy within, [3, C]."""
    lse_C = logits_CV.logsumexp(dim=-1)
    log_p_CV = logits_CV - lse_C[:, None]
    held_C, column_C1 = _columns(local_targets_C, logits_CV.shape[-1])
    picked_C = log_p_CV.gather(-1, column_C1).squeeze(-1)
    entropy_C = -(log_p_CV.exp() * log_p_CV).sum(dim=-1)
    return torch.stack([lse_C, picked_C.masked_fill(~held_C, float("-inf")), entropy_C])


def _logit_gradient(
    logits_CV: Tensor,
    local_targets_C: Tensor,
    lse_C: Tensor,
    logprob_C: Tensor,
    entropy_C: Tensor,
    grad_logprob_C: Tensor,
    grad_entropy_C: Tensor | None,
    settings: HeadSettings,
) -> Tensor:
    """Gradient with respect to this part's uncapped, unscaled logits, float32 [C, V]; see `logprob_head` for the
    formulas, which hold with the global log-sum-exp and entropy."""
    slope_CV = None
    if settings.softcap is not None:
        slope_CV = 1.0 - (logits_CV * (settings.temperature / settings.softcap)) ** 2
    log_p_CV = logits_CV - lse_C[:, None]
    p_CV = log_p_CV.exp()
    grad_CV = p_CV * -grad_logprob_C[:, None]
    held_C, column_C1 = _columns(local_targets_C, logits_CV.shape[-1])
    # 1 - p cancels where p is near 1, so the target's entry is formed from its log-prob
    target_C1 = (grad_logprob_C * -torch.expm1(logprob_C))[:, None]
    grad_CV.scatter_(-1, column_C1, torch.where(held_C[:, None], target_C1, grad_CV.gather(-1, column_C1)))
    if grad_entropy_C is not None:
        grad_CV -= grad_entropy_C[:, None] * p_CV * (log_p_CV + entropy_C[:, None])
    if slope_CV is not None:
        grad_CV *= slope_CV
    return grad_CV if settings.temperature == 1.0 else grad_CV.div_(settings.temperature)


def _columns(local_targets_C: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """Which targets this part holds, and a valid column for every one (any, where it is held elsewhere)."""
    held_C = (local_targets_C >= 0) & (local_targets_C < num_columns)
    return held_C, local_targets_C.clamp(0, num_columns - 1)[:, None]


def _gather(own: Tensor, peers: Peers) -> list[Tensor]:
    parts = [torch.empty_like(own) for _ in range(peers.size)]
    dist.all_gather(parts, own, group=peers.group)
    return parts
