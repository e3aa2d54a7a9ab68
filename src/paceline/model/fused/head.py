"""Log-probability head and loss in one pass: each chunk's logits are formed once and turned into their gradient.

A loss that is a sum over samples needs nothing but its own samples' log-probs, so the loss of a chunk of whole
samples, and with it the gradient of the chunk's logits, is known before the next chunk begins. That saves the
backward pass's recomputation: three products per chunk instead of four.

Shapes: R response tokens, C tokens of a chunk, V vocabulary, E hidden size.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.model.logit_kernels import LogitKernels
from paceline.model.logprob_head import HeadSettings, add_product

ChunkLoss = Callable[[slice, Tensor, Tensor], Tensor]
"""(rows, log-probs [C], entropies [C]) to the scalar partial loss of these rows; called once per chunk, in order."""


def head_loss(
    hidden_RE: Tensor,
    weight_VE: Tensor,
    targets_R: Tensor,
    settings: HeadSettings,
    chunks: Sequence[slice],
    loss_of: ChunkLoss,
    kernels: LogitKernels,
) -> Tensor:
    """Sum of `loss_of` over `chunks` (which partition the rows in order), with gradients of hidden and weight.

    Models with a final logit cap or a head bias are not served (`logprob_head.response_logprobs` is). The gradient
    sums over chunks are float32.
    """
    if settings.softcap is not None:
        raise ValueError("a capped head cannot be computed in one pass")
    loss: Tensor = _HeadLoss.apply(hidden_RE, weight_VE, targets_R, settings, chunks, loss_of, kernels)
    return loss


def chunks_of_samples(sizes: Sequence[int], limit: int) -> list[slice]:
    """Rows of whole samples, together at most `limit` tokens; a longer sample is a chunk of its own."""
    chunks: list[slice] = []
    start = end = 0
    for size in sizes:
        if end > start and end + size - start > limit:
            chunks.append(slice(start, end))
            start = end
        end += size
    if end > start:
        chunks.append(slice(start, end))
    return chunks


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_RE: Tensor,
        weight_VE: Tensor,
        targets_R: Tensor,
        settings: HeadSettings,
        chunks: Sequence[slice],
        loss_of: ChunkLoss,
        kernels: LogitKernels,
    ) -> Tensor:
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden_RE = torch.empty_like(hidden_RE) if needs_hidden else None
        grad_weight_VE = torch.zeros_like(weight_VE, dtype=torch.float32) if needs_weight else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden_RE.device)
        buffer = hidden_RE.new_empty(max((c.stop - c.start for c in chunks), default=0), len(weight_VE))
        for rows in chunks:
            logits_CV = torch.mm(hidden_RE[rows], weight_VE.T, out=buffer[: rows.stop - rows.start])
            statistics = kernels.statistics(logits_CV, targets_R[rows], settings.temperature)
            with torch.enable_grad():
                logprob_C, entropy_C = (part.detach().requires_grad_() for part in statistics[:2])
                chunk_loss = loss_of(rows, logprob_C, entropy_C)
                grad_logprob_C, grad_entropy_C = torch.autograd.grad(
                    chunk_loss, (logprob_C, entropy_C), allow_unused=True
                )
            loss += chunk_loss.detach()
            kernels.gradient_(
                logits_CV, targets_R[rows], statistics, grad_logprob_C, grad_entropy_C, settings.temperature
            )
            if grad_hidden_RE is not None:
                torch.mm(logits_CV, weight_VE, out=grad_hidden_RE[rows])
            if grad_weight_VE is not None:
                add_product(grad_weight_VE, logits_CV.T, hidden_RE[rows])
        ctx.grads = grad_hidden_RE, grad_weight_VE
        ctx.weight_dtype, ctx.kernels = weight_VE.dtype, kernels
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden_RE, grad_weight_VE = ctx.grads
        ctx.grads = None
        if grad_hidden_RE is not None:
            grad_hidden_RE = ctx.kernels.scaled(grad_hidden_RE, grad, grad_hidden_RE.dtype)
        if grad_weight_VE is not None:
            grad_weight_VE = ctx.kernels.scaled(grad_weight_VE, grad, ctx.weight_dtype)
        return grad_hidden_RE, grad_weight_VE, None, None, None, None, None
