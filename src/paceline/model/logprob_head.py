"""Hidden states to log-probability and entropy of response tokens, without ever holding the full logits.

Forward and backward walk over chunks of R response tokens; each chunk's logits [C, V] exist only inside its turn, so
peak extra memory is proportional to chunk x vocabulary. The backward pass recomputes them.

With z = logits / temperature, p = softmax(z):
    logprob = z[y] - logsumexp(z)                  d logprob / d z = onehot(y) - p
    entropy = -sum(p * log p)                      d entropy / d z = -p * (log p + entropy)

Shapes: R response tokens, C tokens of a chunk, V vocabulary, E hidden size.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.model.cpu_linear import linear_few_rows
from paceline.model.exact_products import product_in_tiles
from paceline.model.logit_kernels import logit_kernels_for
from paceline.model.triton_support import has_triton


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """Temperature of the scored distribution, the model's final logit cap (Gemma 2), tokens per chunk."""

    temperature: float
    softcap: float | None
    chunk: int
    with_entropy_grad: bool = False
    exact: bool = False
    """Logits of a token are the same bits whatever tokens stand beside it (`exact_products.py`)."""

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1 token, not {self.chunk}")
        if self.temperature <= 0.0:
            raise ValueError(f"temperature must be positive to score a distribution, not {self.temperature}")


def response_logprobs(
    hidden_RE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, targets_R: Tensor, settings: HeadSettings
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each target, float32 [R] and [R], in nats.

    The entropy carries a gradient only when `settings.with_entropy_grad`; otherwise no graph for it is kept.
    """
    if _kernels_apply(hidden_RE, bias_V, settings):
        logprob_R, entropy_R = _KernelHead.apply(hidden_RE, weight_VE, targets_R, settings)
        return logprob_R, entropy_R
    logprob_R, entropy_R = _ChunkedHead.apply(hidden_RE, weight_VE, bias_V, targets_R, settings)
    return logprob_R, entropy_R


def full_logprobs(
    hidden_RE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, targets_R: Tensor, settings: HeadSettings
) -> tuple[Tensor, Tensor]:
    """The slow reference of `response_logprobs`: all logits at once, plain autograd."""
    logits_RV = scaled_logits(hidden_RE, weight_VE, bias_V, settings)
    log_p_RV = logits_RV.log_softmax(dim=-1)
    entropy_R = -(log_p_RV.exp() * log_p_RV).sum(dim=-1)
    return log_p_RV.gather(-1, targets_R[:, None]).squeeze(-1), entropy_R


def scaled_logits(
    hidden_CE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, settings: HeadSettings
) -> Tensor:
    """Capped logits over temperature, float32 [C, V]; the distribution both sampling and scoring use."""
    logits_CV = _raw_logits(hidden_CE, weight_VE, bias_V, settings).float()
    if settings.softcap is not None:
        logits_CV = settings.softcap * torch.tanh(logits_CV / settings.softcap)
    return logits_CV if settings.temperature == 1.0 else logits_CV / settings.temperature


def _raw_logits(
    hidden_CE: Tensor, weight_VE: Tensor, bias_V: Tensor | None, settings: HeadSettings
) -> Tensor:
    """Logits in the working dtype, [C, V]."""
    if settings.exact:
        return product_in_tiles(hidden_CE, weight_VE, bias_V)
    if bias_V is None and hidden_CE.device.type == "cpu":
        return linear_few_rows(hidden_CE, weight_VE)
    return torch.nn.functional.linear(hidden_CE, weight_VE, bias_V)


def _are_plain(settings: HeadSettings) -> bool:
    """Whether the model's logits are the scored ones: then softmax reads them in the working dtype, in one pass."""
    return settings.softcap is None and settings.temperature == 1.0


def _kernels_apply(hidden_RE: Tensor, bias_V: Tensor | None, settings: HeadSettings) -> bool:
    on_device = hidden_RE.is_cuda and has_triton()
    return on_device and bias_V is None and settings.softcap is None and not settings.exact


class _KernelHead(torch.autograd.Function):
    """The chunked head on kernels that read a chunk's logits once for both results, and turn them into their gradient
    in place."""

    @staticmethod
    def forward(
        ctx: Any, hidden_RE: Tensor, weight_VE: Tensor, targets_R: Tensor, settings: HeadSettings
    ) -> tuple[Tensor, Tensor]:
        statistics_3R = hidden_RE.new_empty(3, len(targets_R), dtype=torch.float32)
        kernels = logit_kernels_for(hidden_RE.device.type)
        for rows in _row_chunks(len(targets_R), settings.chunk):
            logits_CV = hidden_RE[rows] @ weight_VE.T
            found = kernels.statistics(logits_CV, targets_R[rows], settings.temperature)
            torch.stack(found, out=statistics_3R[:, rows])
        ctx.save_for_backward(hidden_RE, weight_VE, targets_R, statistics_3R)
        ctx.settings = settings
        logprob_R, entropy_R = statistics_3R[0].clone(), statistics_3R[1].clone()
        if not settings.with_entropy_grad:
            ctx.mark_non_differentiable(entropy_R)
        return logprob_R, entropy_R

    @staticmethod
    def backward(
        ctx: Any, grad_logprob_R: Tensor, grad_entropy_R: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None]:
        hidden_RE, weight_VE, targets_R, statistics_3R = ctx.saved_tensors
        settings: HeadSettings = ctx.settings
        kernels = logit_kernels_for(hidden_RE.device.type)
        grad_hidden_RE = torch.empty_like(hidden_RE)
        grad_weight_VE = torch.zeros_like(weight_VE, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in _row_chunks(len(targets_R), settings.chunk):
            logits_CV = hidden_RE[rows] @ weight_VE.T
            kernels.gradient_(
                logits_CV,
                targets_R[rows],
                statistics_3R[:, rows].unbind(),
                grad_logprob_R[rows],
                grad_entropy_R[rows] if settings.with_entropy_grad else None,
                settings.temperature,
            )
            torch.mm(logits_CV, weight_VE, out=grad_hidden_RE[rows])
            if grad_weight_VE is not None:
                add_product(grad_weight_VE, logits_CV.T, hidden_RE[rows])
        return (
            grad_hidden_RE,
            None if grad_weight_VE is None else grad_weight_VE.to(weight_VE.dtype),
            None,
            None,
        )


def _row_chunks(num_rows: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, num_rows)) for start in range(0, num_rows, chunk)]


def add_product(total_VE: Tensor, left_VC: Tensor, right_CE: Tensor) -> None:
    """total += left @ right in float32, inside the product where the device can."""
    if total_VE.is_cuda and left_VC.dtype != torch.float32:
        torch.ops.aten.addmm.dtype_out(total_VE, left_VC, right_CE, torch.float32, out=total_VE)
    elif left_VC.dtype == torch.float32:
        total_VE.addmm_(left_VC, right_CE)
    else:
        total_VE += left_VC @ right_CE


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RE: Tensor,
        weight_VE: Tensor,
        bias_V: Tensor | None,
        targets_R: Tensor,
        settings: HeadSettings,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies = [], []
        for hidden_CE, targets_C in zip(
            hidden_RE.split(settings.chunk), targets_R.split(settings.chunk), strict=True
        ):
            if _are_plain(settings):
                logits_CV = _raw_logits(hidden_CE, weight_VE, bias_V, settings)
                log_p_CV = logits_CV.log_softmax(dim=-1, dtype=torch.float32)
            else:
                log_p_CV = scaled_logits(hidden_CE, weight_VE, bias_V, settings).log_softmax(dim=-1)
            logprobs.append(log_p_CV.gather(-1, targets_C[:, None]).squeeze(-1))
            # -sum(p log p), not log_z - sum(p z): the latter cancels to noise where one token has all the mass
            entropies.append(-log_p_CV.exp().mul_(log_p_CV).sum(dim=-1))
        logprob_R = torch.cat(logprobs) if logprobs else hidden_RE.new_zeros(0, dtype=torch.float32)
        entropy_R = torch.cat(entropies) if entropies else hidden_RE.new_zeros(0, dtype=torch.float32)
        ctx.save_for_backward(hidden_RE, weight_VE, bias_V, targets_R, logprob_R)
        ctx.settings = settings
        if not settings.with_entropy_grad:
            ctx.mark_non_differentiable(entropy_R)
        return logprob_R, entropy_R

    @staticmethod
    def backward(
        ctx: Any, grad_logprob_R: Tensor, grad_entropy_R: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        hidden_RE, weight_VE, bias_V, targets_R, logprob_R = ctx.saved_tensors
        settings: HeadSettings = ctx.settings
        needs_weight = ctx.needs_input_grad[1]
        grad_hidden_RE = torch.empty_like(hidden_RE)
        # float32 sums over chunks: the result must not depend on how many there are
        grad_weight_VE = torch.zeros_like(weight_VE, dtype=torch.float32) if needs_weight else None
        grad_bias_V = (
            torch.zeros_like(bias_V, dtype=torch.float32)
            if bias_V is not None and ctx.needs_input_grad[2]
            else None
        )
        for start in range(0, len(targets_R), settings.chunk):
            rows = slice(start, start + settings.chunk)
            grad_logits_CV = _logit_gradient(
                hidden_RE[rows],
                weight_VE,
                bias_V,
                targets_R[rows],
                logprob_R[rows],
                settings,
                grad_logprob_R[rows],
                grad_entropy_R[rows] if settings.with_entropy_grad else None,
            )
            if grad_bias_V is not None:
                grad_bias_V += grad_logits_CV.sum(dim=0, dtype=torch.float32)
            grad_logits_CV = grad_logits_CV.to(weight_VE.dtype)
            grad_hidden_RE[rows] = grad_logits_CV @ weight_VE
            if grad_weight_VE is not None:
                grad_weight_VE += grad_logits_CV.T @ hidden_RE[rows]
        return (
            grad_hidden_RE,
            None if grad_weight_VE is None else grad_weight_VE.to(weight_VE.dtype),
            None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype),
            None,
            None,
        )


def _logit_gradient(
    hidden_CE: Tensor,
    weight_VE: Tensor,
    bias_V: Tensor | None,
    targets_C: Tensor,
    logprob_C: Tensor,
    settings: HeadSettings,
    grad_logprob_C: Tensor,
    grad_entropy_C: Tensor | None,
) -> Tensor:
    """Gradient with respect to the uncapped, unscaled logits of one chunk, [C, V], in float32 or the working dtype.

    The target's entry, gradient * (1 - p), is formed in float32: 1 - p cancels where p is near 1.
    """
    target_C1 = (grad_logprob_C * -torch.expm1(logprob_C))[:, None]
    if _are_plain(settings) and grad_entropy_C is None:
        p_CV = _raw_logits(hidden_CE, weight_VE, bias_V, settings).softmax(dim=-1)
        grad_CV = p_CV.mul_(-grad_logprob_C[:, None].to(p_CV.dtype))
        return grad_CV.scatter_(-1, targets_C[:, None], target_C1.to(grad_CV.dtype))
    logits_CV = scaled_logits(hidden_CE, weight_VE, bias_V, settings)
    slope_CV = None
    if settings.softcap is not None:
        slope_CV = 1.0 - (logits_CV * (settings.temperature / settings.softcap)) ** 2
    log_p_CV = logits_CV.log_softmax(dim=-1)
    p_CV = log_p_CV.exp()
    grad_CV = p_CV * -grad_logprob_C[:, None]
    grad_CV.scatter_(-1, targets_C[:, None], target_C1)
    if grad_entropy_C is not None:
        entropy_C1 = -(p_CV * log_p_CV).sum(dim=-1, keepdim=True)
        grad_CV -= grad_entropy_C[:, None] * p_CV * (log_p_CV + entropy_C1)
    if slope_CV is not None:
        grad_CV *= slope_CV
    return grad_CV if settings.temperature == 1.0 else grad_CV.div_(settings.temperature)
