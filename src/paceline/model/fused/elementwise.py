"""What a fused decoder layer computes between its matrix multiplications.

Shapes: T tokens, E hidden size, N = (H + 2 K) * D columns of the joint query-key-value product, H query heads,
K kv heads, D head width, I intermediate size.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How the columns of the joint product are cut into heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float

    @property
    def num_columns(self) -> int:
        """N: query, key and value columns together."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


class Elementwise(Protocol):
    """Norms, rotary embedding and gate of a layer, forward and backward. All sums are taken in float32."""

    def add_rms_norm(
        self, x_TE: Tensor, added_TE: Tensor | None, weight_E: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(x + added, its norm times weight, reciprocal root mean squares [T]); without `added` the first is x."""
        ...

    def rms_norm_backward(
        self,
        grad_TE: Tensor,
        x_TE: Tensor,
        rstd_T: Tensor,
        weight_E: Tensor,
        residual_grad_TE: Tensor,
        with_normed: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """(gradient of x plus `residual_grad`, gradient of weight, the normed input again if asked for)."""
        ...

    def rotate(
        self,
        qkv_TN: Tensor,
        query_weight_D: Tensor | None,
        key_weight_D: Tensor | None,
        cos_TD: Tensor,
        sin_TD: Tensor,
        layout: HeadLayout,
    ) -> tuple[Tensor, Tensor]:
        """Queries [T, H, D] and keys [T, K, D]: normed per head where there are weights, then rotated."""
        ...

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
        """(gradient of the joint product [T, N], gradients of the two norm weights)."""
        ...

    def gate(self, gate_up_T2I: Tensor) -> Tensor:
        """silu(gate) * up, [T, I]; gate is the first half of the columns."""
        ...

    def gate_backward(
        self, grad_TI: Tensor, gate_up_T2I: Tensor, with_gated: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(gradient of gate and up [T, 2I], the gated product again if asked for)."""
        ...
