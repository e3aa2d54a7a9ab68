"""The kernel of `fused_adam.py`. Imported only where Triton is installed."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _adamw_kernel(
    master_ptr, working_ptr, grad_ptr, average_ptr, square_ptr, norm_ptr, size, lr, beta_1, beta_2, eps, decay,
    correction_1, correction_2, clip, SEPARATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    norm = tl.load(norm_ptr)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.where(tl.abs(norm) < float("inf"), size, 0)  # nothing where the norm is not finite
    grad = tl.load(grad_ptr + at, inside, other=0.0).to(tl.float32)
    limit = tl.where(clip > 0.0, clip, float("inf"))
    grad *= tl.where(norm > limit, limit / (norm + 1e-6), 1.0)
    master = tl.load(master_ptr + at, inside, other=0.0)
    average = tl.load(average_ptr + at, inside, other=0.0)
    square = tl.load(square_ptr + at, inside, other=0.0)
    master *= 1.0 - lr * decay
    average += (grad - average) * (1.0 - beta_1)
    square = square * beta_2 + grad * grad * (1.0 - beta_2)
    master -= (lr / correction_1) * average / (tl.sqrt(square) / correction_2 + eps)
    tl.store(master_ptr + at, master, inside)
    tl.store(average_ptr + at, average, inside)
    tl.store(square_ptr + at, square, inside)
    if SEPARATE:
        tl.store(working_ptr + at, master.to(working_ptr.dtype.element_ty), inside)


def launch(
    master: Tensor,
    working: Tensor | None,
    gradient: Tensor,
    average: Tensor,
    square: Tensor,
    norm: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    corrections: tuple[float, float],
    clip: float,
) -> None:
    """Updates one parameter in place; `working` is its copy in the working dtype, None where the master is it."""
    assert master.is_contiguous() and (working is None or working.is_contiguous())
    size = master.numel()
    _adamw_kernel[(triton.cdiv(size, _BLOCK),)](
        master,
        master if working is None else working,
        gradient.contiguous(),
        average,
        square,
        norm,
        size,
        lr,
        *betas,
        eps,
        weight_decay,
        *corrections,
        clip,
        SEPARATE=working is not None,
        BLOCK=_BLOCK,
    )
