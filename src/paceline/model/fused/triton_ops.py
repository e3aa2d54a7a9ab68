"""`Elementwise` on CUDA through Triton; shapes there. Imported only where Triton is installed (`kernels.py`)."""

import torch
import triton
from torch import Tensor

from paceline.model.fused import triton_kernels
from paceline.model.fused.elementwise import HeadLayout

_GATE_BLOCK = 1024
_PROGRAMS_PER_MULTIPROCESSOR = 4
_ROTATE_PROGRAMS_PER_MULTIPROCESSOR = 8  # measured on an H200: 163 us with 4, 139 with 8, 144 with 16


class TritonElementwise:
    """One launch per method; inputs must be contiguous, except as stated."""

    def __init__(self, device: torch.device) -> None:
        count = torch.cuda.get_device_properties(device).multi_processor_count
        self._num_programs = _PROGRAMS_PER_MULTIPROCESSOR * count
        self._num_rotate_programs = _ROTATE_PROGRAMS_PER_MULTIPROCESSOR * count

    def add_rms_norm(
        self, x_TE: Tensor, added_TE: Tensor | None, weight_E: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_rows, num_cols = x_TE.shape
        assert x_TE.is_contiguous() and (added_TE is None or added_TE.is_contiguous())
        total_TE = x_TE if added_TE is None else torch.empty_like(x_TE)
        normed_TE = torch.empty_like(x_TE)
        rstd_T = torch.empty(num_rows, dtype=torch.float32, device=x_TE.device)
        block = triton.next_power_of_2(num_cols)
        triton_kernels.add_rms_norm_kernel[(num_rows,)](
            x_TE,
            x_TE if added_TE is None else added_TE,
            weight_E,
            total_TE,
            normed_TE,
            rstd_T,
            num_cols,
            eps,
            HAS_ADDED=added_TE is not None,
            BLOCK=block,
            num_warps=_num_warps(block),
        )
        return total_TE, normed_TE, rstd_T

    def rms_norm_backward(
        self,
        grad_TE: Tensor,
        x_TE: Tensor,
        rstd_T: Tensor,
        weight_E: Tensor,
        residual_grad_TE: Tensor,
        with_normed: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        num_rows, num_cols = x_TE.shape
        assert grad_TE.is_contiguous() and x_TE.is_contiguous() and residual_grad_TE.is_contiguous()
        out_TE = torch.empty_like(x_TE)
        normed_TE = torch.empty_like(x_TE) if with_normed else None
        num_programs = min(num_rows, self._num_programs)
        partial = torch.empty(num_programs, num_cols, dtype=torch.float32, device=x_TE.device)
        block = triton.next_power_of_2(num_cols)
        triton_kernels.rms_norm_backward_kernel[(num_programs,)](
            grad_TE,
            x_TE,
            rstd_T,
            weight_E,
            residual_grad_TE,
            out_TE,
            out_TE if normed_TE is None else normed_TE,
            partial,
            num_rows,
            num_cols,
            WITH_NORMED=with_normed,
            BLOCK=block,
            num_warps=_num_warps(block),
        )
        return out_TE, partial.sum(dim=0).to(weight_E.dtype), normed_TE

    def rotate(
        self,
        qkv_TN: Tensor,
        query_weight_D: Tensor | None,
        key_weight_D: Tensor | None,
        cos_TD: Tensor,
        sin_TD: Tensor,
        layout: HeadLayout,
    ) -> tuple[Tensor, Tensor]:
        assert qkv_TN.is_contiguous() and cos_TD.is_contiguous() and sin_TD.is_contiguous()
        num_tokens = len(qkv_TN)
        query_THD = qkv_TN.new_empty(num_tokens, layout.num_heads, layout.head_dim)
        key_TKD = qkv_TN.new_empty(num_tokens, layout.num_kv_heads, layout.head_dim)
        triton_kernels.rotate_kernel[(num_tokens,)](
            qkv_TN,
            qkv_TN if query_weight_D is None else query_weight_D,
            qkv_TN if key_weight_D is None else key_weight_D,
            cos_TD,
            sin_TD,
            query_THD,
            key_TKD,
            layout.norm_eps,
            H=layout.num_heads,
            K=layout.num_kv_heads,
            D=layout.head_dim,
            HAS_NORM=query_weight_D is not None,
            HEADS=triton.next_power_of_2(layout.num_heads + layout.num_kv_heads),
            num_warps=4,
        )
        return query_THD, key_TKD

    def rotate_backward(
        self,
        grad_query_THD: Tensor,
        grad_key_TKD: Tensor,
        grad_value_TKD: Tensor,
        qkv_TN: Tensor,
        query_weight_D: Tensor | None,
        key_weight_D: Tensor | None,
        cos_TD: Tensor,
        sin_TD: Tensor,
        layout: HeadLayout,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        num_tokens = len(qkv_TN)
        has_norm = query_weight_D is not None and key_weight_D is not None
        out_TN = torch.empty_like(qkv_TN)
        num_programs = min(num_tokens, self._num_rotate_programs)
        partial = qkv_TN.new_empty(num_programs, 2, layout.head_dim, dtype=torch.float32)
        triton_kernels.rotate_backward_kernel[(num_programs,)](
            grad_query_THD.contiguous(),
            grad_key_TKD.contiguous(),
            grad_value_TKD.contiguous(),
            qkv_TN,
            query_weight_D if has_norm else qkv_TN,
            key_weight_D if has_norm else qkv_TN,
            cos_TD,
            sin_TD,
            out_TN,
            partial,
            num_tokens,
            layout.norm_eps,
            H=layout.num_heads,
            K=layout.num_kv_heads,
            D=layout.head_dim,
            HAS_NORM=has_norm,
            HEADS=triton.next_power_of_2(layout.num_heads + layout.num_kv_heads),
            VALUE_COLS=triton.next_power_of_2(layout.num_kv_heads * layout.head_dim),
            num_warps=4,
        )
        if query_weight_D is None or key_weight_D is None:
            return out_TN, None, None
        query_grad_D, key_grad_D = partial.sum(dim=0)
        return out_TN, query_grad_D.to(query_weight_D.dtype), key_grad_D.to(key_weight_D.dtype)

    def gate(self, gate_up_T2I: Tensor) -> Tensor:
        assert gate_up_T2I.is_contiguous()
        num_rows, num_cols = len(gate_up_T2I), gate_up_T2I.shape[1] // 2
        out_TI = gate_up_T2I.new_empty(num_rows, num_cols)
        triton_kernels.gate_kernel[(num_rows, triton.cdiv(num_cols, _GATE_BLOCK))](
            gate_up_T2I, out_TI, num_cols, BLOCK=_GATE_BLOCK
        )
        return out_TI

    def gate_backward(
        self, grad_TI: Tensor, gate_up_T2I: Tensor, with_gated: bool
    ) -> tuple[Tensor, Tensor | None]:
        assert gate_up_T2I.is_contiguous() and grad_TI.is_contiguous()
        num_rows, num_cols = grad_TI.shape
        out_T2I = torch.empty_like(gate_up_T2I)
        gated_TI = torch.empty_like(grad_TI) if with_gated else None
        triton_kernels.gate_backward_kernel[(num_rows, triton.cdiv(num_cols, _GATE_BLOCK))](
            grad_TI,
            gate_up_T2I,
            out_T2I,
            grad_TI if gated_TI is None else gated_TI,
            num_cols,
            WITH_GATED=with_gated,
            BLOCK=_GATE_BLOCK,
        )
        return out_T2I, gated_TI


def _num_warps(block: int) -> int:
    return max(1, min(8, block // 256))
