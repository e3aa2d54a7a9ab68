"""Softmax statistics of logits and the gradient that takes their place, without a copy of the logits.

Shapes: C tokens of a chunk, V vocabulary.
"""

import functools
import importlib
from typing import Protocol, cast

import torch
from torch import Tensor

from paceline.model.triton_support import has_triton


class LogitKernels(Protocol):
    """Softmax statistics of logits and their gradient, without a copy of the logits."""

    def statistics(
        self, logits_CV: Tensor, targets_C: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(log-prob of the targets, entropy, log of the normaliser), float32 [C] each."""
        ...

    def gradient_(
        self,
        logits_CV: Tensor,
        targets_C: Tensor,
        statistics: tuple[Tensor, Tensor, Tensor],
        grad_logprob_C: Tensor,
        grad_entropy_C: Tensor | None,
        temperature: float,
    ) -> None:
        """Overwrites the logits with the loss's gradient with respect to them."""
        ...

    def scaled(self, tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """tensor * factor (a scalar tensor), rounded once to `dtype`."""
        ...


class ReferenceLogitKernels:
    """The same in plain torch."""

    def statistics(
        self, logits_CV: Tensor, targets_C: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        z_CV = logits_CV.float() / temperature
        norm_C = z_CV.logsumexp(dim=-1)
        log_p_CV = z_CV - norm_C[:, None]
        logprob_C = log_p_CV.gather(-1, targets_C[:, None]).squeeze(-1)
        return logprob_C, -(log_p_CV.exp() * log_p_CV).sum(dim=-1), norm_C

    def gradient_(
        self,
        logits_CV: Tensor,
        targets_C: Tensor,
        statistics: tuple[Tensor, Tensor, Tensor],
        grad_logprob_C: Tensor,
        grad_entropy_C: Tensor | None,
        temperature: float,
    ) -> None:
        logprob_C, entropy_C, norm_C = statistics
        log_p_CV = logits_CV.float() / temperature - norm_C[:, None]
        p_CV = log_p_CV.exp()
        grad_CV = -grad_logprob_C[:, None] * p_CV
        own_C1 = (grad_logprob_C * -torch.expm1(logprob_C))[:, None]
        grad_CV.scatter_(-1, targets_C[:, None], own_C1)
        if grad_entropy_C is not None:
            grad_CV -= grad_entropy_C[:, None] * p_CV * (log_p_CV + entropy_C[:, None])
        logits_CV.copy_(grad_CV / temperature)

    def scaled(self, tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        return (tensor.float() * factor).to(dtype)


@functools.cache
def logit_kernels_for(device_type: str) -> LogitKernels:
    """Triton kernels on CUDA, plain torch elsewhere."""
    if device_type == "cuda" and has_triton():
        # by name, because the module defines kernels on import and cannot be imported without Triton
        module = importlib.import_module("paceline.model.fused.triton_head")
        return cast(LogitKernels, module.TritonLogitKernels())
    return ReferenceLogitKernels()
