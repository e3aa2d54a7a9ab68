"""`LogitKernels` on CUDA through Triton; shapes there. Imported only where Triton is installed (`head.py`)."""

import torch
import triton
from torch import Tensor

from paceline.model.fused import triton_kernels

_STATISTICS_BLOCK = 4096
_GRADIENT_BLOCK = 2048


class TritonLogitKernels:
    """Logits are read once for the statistics and once more for the gradient, which takes their place."""

    def statistics(
        self, logits_CV: Tensor, targets_C: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert logits_CV.is_contiguous() and targets_C.dtype == torch.int64
        num_rows, num_cols = logits_CV.shape
        logprob_C, entropy_C, norm_C = torch.empty(3, num_rows, dtype=torch.float32, device=logits_CV.device)
        triton_kernels.logit_statistics_kernel[(num_rows,)](
            logits_CV,
            targets_C,
            logprob_C,
            entropy_C,
            norm_C,
            num_cols,
            1.0 / temperature,
            BLOCK=_STATISTICS_BLOCK,
            num_warps=8,
        )
        return logprob_C, entropy_C, norm_C

    def gradient_(
        self,
        logits_CV: Tensor,
        targets_C: Tensor,
        statistics: tuple[Tensor, Tensor, Tensor],
        grad_logprob_C: Tensor,
        grad_entropy_C: Tensor | None,
        temperature: float,
    ) -> None:
        assert logits_CV.is_contiguous() and grad_logprob_C.dtype == torch.float32
        num_rows, num_cols = logits_CV.shape
        logprob_C, entropy_C, norm_C = statistics
        triton_kernels.logit_gradient_kernel[(num_rows, triton.cdiv(num_cols, _GRADIENT_BLOCK))](
            logits_CV,
            targets_C,
            logprob_C.contiguous(),
            entropy_C.contiguous(),
            norm_C.contiguous(),
            grad_logprob_C.contiguous(),
            grad_logprob_C if grad_entropy_C is None else grad_entropy_C.contiguous(),
            num_cols,
            1.0 / temperature,
            WITH_ENTROPY=grad_entropy_C is not None,
            BLOCK=_GRADIENT_BLOCK,
        )

    def scaled(self, tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        assert tensor.is_contiguous() and factor.numel() == 1
        out = torch.empty_like(tensor, dtype=dtype)
        grid = (triton.cdiv(tensor.numel(), _GRADIENT_BLOCK),)
        triton_kernels.scale_kernel[grid](tensor, factor, out, tensor.numel(), BLOCK=_GRADIENT_BLOCK)
        return out
