"""The layer's element-wise work in plain torch: runs everywhere, and is what the kernels are compared with.

Roundings are where transformers has them: a norm is rounded to the working dtype before its weight is applied.
"""

import torch
from torch import Tensor

from paceline.model.fused.elementwise import HeadLayout


class ReferenceElementwise:
    """Implements `Elementwise`; see there for shapes."""

    def add_rms_norm(
        self, x_TE: Tensor, added_TE: Tensor | None, weight_E: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        total_TE = x_TE if added_TE is None else x_TE + added_TE
        rstd_T = torch.rsqrt(total_TE.float().pow(2).mean(dim=-1) + eps)
        return total_TE, _normed(total_TE, rstd_T, weight_E), rstd_T

    def rms_norm_backward(
        self,
        grad_TE: Tensor,
        x_TE: Tensor,
        rstd_T: Tensor,
        weight_E: Tensor,
        residual_grad_TE: Tensor,
        with_normed: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        grad_x_TE, grad_weight_E = _norm_gradients(grad_TE.float(), x_TE.float(), rstd_T[:, None], weight_E)
        normed_TE = _normed(x_TE, rstd_T, weight_E) if with_normed else None
        total_TE = (grad_x_TE + residual_grad_TE.float()).to(x_TE.dtype)
        return total_TE, grad_weight_E.to(weight_E.dtype), normed_TE

    def rotate(
        self,
        qkv_TN: Tensor,
        query_weight_D: Tensor | None,
        key_weight_D: Tensor | None,
        cos_TD: Tensor,
        sin_TD: Tensor,
        layout: HeadLayout,
    ) -> tuple[Tensor, Tensor]:
        query_THD, key_TKD = _cut(qkv_TN, layout)
        return (
            _normed_and_rotated(query_THD, query_weight_D, cos_TD, sin_TD, layout.norm_eps),
            _normed_and_rotated(key_TKD, key_weight_D, cos_TD, sin_TD, layout.norm_eps),
        )

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
        query_THD, key_TKD = _cut(qkv_TN, layout)
        eps = layout.norm_eps
        grad_q, grad_query_weight = _unrotated(grad_query_THD, query_THD, query_weight_D, cos_TD, sin_TD, eps)
        grad_k, grad_key_weight = _unrotated(grad_key_TKD, key_TKD, key_weight_D, cos_TD, sin_TD, eps)
        grad_qkv_TN = torch.cat([grad_q.flatten(1), grad_k.flatten(1), grad_value_TKD.flatten(1)], dim=1)
        return grad_qkv_TN, grad_query_weight, grad_key_weight

    def gate(self, gate_up_T2I: Tensor) -> Tensor:
        gate_TI, up_TI = gate_up_T2I.chunk(2, dim=1)
        return (torch.nn.functional.silu(gate_TI.float()) * up_TI.float()).to(gate_up_T2I.dtype)

    def gate_backward(
        self, grad_TI: Tensor, gate_up_T2I: Tensor, with_gated: bool
    ) -> tuple[Tensor, Tensor | None]:
        gate_TI, up_TI = (half.float() for half in gate_up_T2I.chunk(2, dim=1))
        sigmoid_TI = torch.sigmoid(gate_TI)
        silu_TI = gate_TI * sigmoid_TI
        slope_TI = sigmoid_TI * (1.0 + gate_TI * (1.0 - sigmoid_TI))
        grad_TI = grad_TI.float()
        grad_T2I = torch.cat([grad_TI * up_TI * slope_TI, grad_TI * silu_TI], dim=1)
        gated_TI = (silu_TI * up_TI).to(gate_up_T2I.dtype) if with_gated else None
        return grad_T2I.to(gate_up_T2I.dtype), gated_TI


def _normed(x_TE: Tensor, rstd_T: Tensor, weight_E: Tensor) -> Tensor:
    return (x_TE.float() * rstd_T[:, None]).to(x_TE.dtype) * weight_E


def _norm_gradients(grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of y = x * rstd * weight with respect to x and weight; float32, last axis normed."""
    unit = x * rstd
    weighted = grad * weight.float()
    grad_x = rstd * (weighted - unit * (weighted * unit).mean(dim=-1, keepdim=True))
    return grad_x, (grad * unit).flatten(0, -2).sum(dim=0)


def _cut(qkv_TN: Tensor, layout: HeadLayout) -> tuple[Tensor, Tensor]:
    """Queries and keys of the joint product, per head."""
    widths = [layout.num_heads * layout.head_dim, layout.num_kv_heads * layout.head_dim]
    query, key, _ = qkv_TN.split([*widths, widths[1]], dim=1)
    return query.unflatten(1, (-1, layout.head_dim)), key.unflatten(1, (-1, layout.head_dim))


def _turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _turn_back(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([second, -first], dim=-1)


def _normed_and_rotated(
    x_THD: Tensor, weight_D: Tensor | None, cos_TD: Tensor, sin_TD: Tensor, eps: float
) -> Tensor:
    unit = x_THD.float()
    if weight_D is not None:
        rstd = torch.rsqrt(unit.pow(2).mean(dim=-1, keepdim=True) + eps)
        unit = ((unit * rstd).to(x_THD.dtype) * weight_D).float()
    rotated = unit * cos_TD[:, None].float() + _turn(unit) * sin_TD[:, None].float()
    return rotated.to(x_THD.dtype)


def _unrotated(
    grad_THD: Tensor, x_THD: Tensor, weight_D: Tensor | None, cos_TD: Tensor, sin_TD: Tensor, eps: float
) -> tuple[Tensor, Tensor | None]:
    grad = grad_THD.float()
    grad = grad * cos_TD[:, None].float() + _turn_back(grad * sin_TD[:, None].float())
    if weight_D is None:
        return grad.to(x_THD.dtype), None
    x = x_THD.float()
    rstd = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps)
    grad_x, grad_weight_D = _norm_gradients(grad, x, rstd, weight_D)
    return grad_x.to(x_THD.dtype), grad_weight_D.to(weight_D.dtype)
