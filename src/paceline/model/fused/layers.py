"""A Llama-like decoder layer as two differentiable functions around its attention.

    before attention: x -> norm -> joint query-key-value product -> per-head norm and rotary embedding
    after attention:  output product + x -> norm -> joint gate-up product -> silu(gate) * up -> down product + residual

Weights stay the transformers module's parameters. Where their storage allows it, the query, key and value weights
(and gate and up) become views of one matrix, so that each joint product is one multiplication; where it does not
(sharded parameters), the matrices are joined for the call. Backward passes are written out so that residual gradients
are added inside the norms and weight gradients come from one product per joint matrix.

Shapes: B rows, T = B * length tokens, E hidden size, N joint columns, H query heads, K kv heads, D head width,
I intermediate size.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.model.attention import AttentionArgs, AttentionPlan, UnsupportedAttentionError
from paceline.model.fused.elementwise import Elementwise, HeadLayout

FUSED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s whose layers have the form above."""


@dataclass(frozen=True, slots=True)
class FusionOutcome:
    """What `fuse_layers` did: `num_layers` fused, or 0 and the reason."""

    num_layers: int
    reason: str | None


@dataclass(slots=True)
class KeepPolicy:
    """What a layer keeps for its backward pass.

    `cheap`: results of element-wise work (normed inputs, gated product); without it they are formed again in the
    backward kernels, at the cost of writing them once more. `gate_up`: the joint gate-up product, the largest
    activation; without it that one multiplication is repeated.
    """

    cheap: bool = True
    gate_up: bool = True


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A layer's parameters and sizes, as the two functions take them."""

    ops: Elementwise
    layout: HeadLayout
    eps: float
    keep: KeepPolicy


class JointWeight:
    """Several weights with the same number of columns as one matrix [sum of rows, columns]."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._rows = [weight.shape[0] for weight in weights]

    def join(self, weights: Sequence[Tensor]) -> Tensor:
        """The joint matrix: a view where the weights lie one behind the other, else a copy."""
        first = weights[0]
        offset = first.storage_offset()
        adjacent = all(weight.is_contiguous() for weight in weights)
        for weight in weights:
            same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            adjacent = adjacent and same and weight.storage_offset() == offset
            offset += weight.numel()
        if adjacent:
            return first.as_strided((sum(self._rows), first.shape[1]), (first.shape[1], 1))
        return torch.cat(list(weights))

    def cut(self, grad: Tensor) -> tuple[Tensor, ...]:
        """A gradient of the joint matrix as those of the weights."""
        return grad.split(self._rows)


@torch.no_grad()
def lay_side_by_side(weights: Sequence[nn.Parameter]) -> None:
    """Moves the weights into one storage, one behind the other; values and parameter objects stay."""
    joint = torch.cat([weight.detach() for weight in weights])
    start = 0
    for weight in weights:
        weight.data = joint[start : start + weight.shape[0]]
        start += weight.shape[0]


class _BeforeAttention(torch.autograd.Function):
    """x [T, E] to queries [T, H, D], keys and values [T, K, D], and x once more for the residual."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TE: Tensor,
        cos_TD: Tensor,
        sin_TD: Tensor,
        parts: LayerParts,
        norm_E: Tensor,
        query_norm_D: Tensor | None,
        key_norm_D: Tensor | None,
        bias_N: Tensor | None,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        joint = JointWeight(weights)  # type: ignore[arg-type]
        weight_NE = joint.join(weights)
        _, normed_TE, rstd_T = parts.ops.add_rms_norm(x_TE, None, norm_E, parts.eps)
        qkv_TN = _product(normed_TE, weight_NE, bias_N)
        layout = parts.layout
        query_THD, key_TKD = parts.ops.rotate(qkv_TN, query_norm_D, key_norm_D, cos_TD, sin_TD, layout)
        start = (layout.num_heads + layout.num_kv_heads) * layout.head_dim
        value_TKD = qkv_TN[:, start:].unflatten(1, (layout.num_kv_heads, layout.head_dim)).contiguous()
        kept = normed_TE if parts.keep.cheap else None
        ctx.save_for_backward(
            x_TE,
            rstd_T,
            kept,
            qkv_TN if query_norm_D is not None else None,
            cos_TD,
            sin_TD,
            norm_E,
            query_norm_D,
            key_norm_D,
            bias_N,
            *weights,
        )
        ctx.parts, ctx.joint = parts, joint
        return query_THD, key_TKD, value_TKD, x_TE.view_as(x_TE)

    @staticmethod
    def backward(
        ctx: Any, grad_query: Tensor, grad_key: Tensor, grad_value: Tensor, grad_residual_TE: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, rstd, normed, qkv, cos, sin, norm, query_norm, key_norm, bias, *weights = ctx.saved_tensors
        parts: LayerParts = ctx.parts
        if qkv is None:
            qkv = grad_query.new_empty(len(x), parts.layout.num_columns)  # only its shape is read
        grad_qkv_TN, grad_query_norm, grad_key_norm = parts.ops.rotate_backward(
            grad_query, grad_key, grad_value, qkv, query_norm, key_norm, cos, sin, parts.layout
        )
        weight_NE = ctx.joint.join(weights)
        grad_normed_TE = grad_qkv_TN @ weight_NE
        grad_x_TE, grad_norm_E, again = parts.ops.rms_norm_backward(
            grad_normed_TE, x, rstd, norm, grad_residual_TE.contiguous(), with_normed=normed is None
        )
        normed_TE = again if normed is None else normed
        assert normed_TE is not None
        grad_weights: tuple[Tensor | None, ...] = (None,) * len(weights)
        if any(ctx.needs_input_grad[8:]):
            grad_weights = ctx.joint.cut(grad_qkv_TN.T @ normed_TE)
        grad_bias = None if bias is None else grad_qkv_TN.sum(dim=0, dtype=torch.float32).to(bias.dtype)
        return (
            grad_x_TE,
            None,
            None,
            None,
            grad_norm_E,
            grad_query_norm,
            grad_key_norm,
            grad_bias,
            *grad_weights,
        )


class _AfterAttention(torch.autograd.Function):
    """Residual x [T, E] and attention output [T, H * D] to the layer's output [T, E]."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TE: Tensor,
        attended_TF: Tensor,
        parts: LayerParts,
        norm_E: Tensor,
        out_weight_EF: Tensor,
        gate_weight_IE: Tensor,
        up_weight_IE: Tensor,
        down_weight_EI: Tensor,
    ) -> Tensor:
        joint = JointWeight((gate_weight_IE, up_weight_IE))  # type: ignore[arg-type]
        ops, keep = parts.ops, parts.keep
        projected_TE = attended_TF @ out_weight_EF.T
        middle_TE, normed_TE, rstd_T = ops.add_rms_norm(projected_TE, x_TE, norm_E, parts.eps)
        gate_up_T2I = normed_TE @ joint.join((gate_weight_IE, up_weight_IE)).T
        gated_TI = ops.gate(gate_up_T2I)
        out_TE = gated_TI @ down_weight_EI.T
        ctx.save_for_backward(
            attended_TF,
            middle_TE,
            rstd_T,
            normed_TE if keep.cheap else None,
            gate_up_T2I if keep.gate_up else None,
            gated_TI if keep.cheap and keep.gate_up else None,
            norm_E,
            out_weight_EF,
            gate_weight_IE,
            up_weight_IE,
            down_weight_EI,
        )
        ctx.parts, ctx.joint = parts, joint
        return out_TE.add_(middle_TE)

    @staticmethod
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, ...]:
        attended, middle, rstd, normed, gate_up, gated, norm, out_weight, gate_w, up_w, down_w = (
            ctx.saved_tensors
        )
        parts: LayerParts = ctx.parts
        needs_weights = ctx.needs_input_grad[4]
        grad_TE = grad_TE.contiguous()
        weight_2IE = ctx.joint.join((gate_w, up_w))
        if gate_up is None:
            if normed is None:
                normed = (middle.float() * rstd[:, None]).to(middle.dtype) * norm
            gate_up = normed @ weight_2IE.T
        grad_gated_TI = grad_TE @ down_w
        grad_gate_up_T2I, again = parts.ops.gate_backward(grad_gated_TI, gate_up, with_gated=gated is None)
        gated_TI = again if gated is None else gated
        assert gated_TI is not None
        grad_down = grad_TE.T @ gated_TI if needs_weights else None
        del gated, gated_TI, gate_up, grad_gated_TI, again
        grad_normed_TE = grad_gate_up_T2I @ weight_2IE
        grad_middle_TE, grad_norm_E, normed_again = parts.ops.rms_norm_backward(
            grad_normed_TE, middle, rstd, norm, grad_TE, with_normed=normed is None
        )
        normed_TE = normed_again if normed is None else normed
        assert normed_TE is not None
        grad_gate, grad_up = ctx.joint.cut(grad_gate_up_T2I.T @ normed_TE) if needs_weights else (None, None)
        del grad_gate_up_T2I
        grad_out = grad_middle_TE.T @ attended if needs_weights else None
        grad_attended_TF = grad_middle_TE @ out_weight
        return grad_middle_TE, grad_attended_TF, None, grad_norm_E, grad_out, grad_gate, grad_up, grad_down


def _product(x_TE: Tensor, weight_NE: Tensor, bias_N: Tensor | None) -> Tensor:
    return x_TE @ weight_NE.T if bias_N is None else torch.addmm(bias_N, x_TE, weight_NE.T)


class FusedLayer:
    """The forward of one transformers decoder layer, bound to that layer's own parameters."""

    def __init__(self, layer: Any, ops: Elementwise, keep: KeepPolicy) -> None:
        """`layer` has the parts of transformers' Llama layer; `fuse_layers` has checked that."""
        attention = layer.self_attn
        self._layer, self._attention = layer, attention
        self._window = _window(attention)
        eps = layer.input_layernorm.variance_epsilon
        head_dim = attention.head_dim
        layout = HeadLayout(
            num_heads=attention.q_proj.weight.shape[0] // head_dim,
            num_kv_heads=attention.k_proj.weight.shape[0] // head_dim,
            head_dim=head_dim,
            norm_eps=eps,
        )
        self.parts = LayerParts(ops, layout, eps, keep)

    def attention_args(self) -> AttentionArgs:
        """What this layer adds to an attention plan."""
        return AttentionArgs(self._attention.layer_idx, self._attention.scaling, self._window, None)

    def head_norms(self) -> tuple[Tensor | None, Tensor | None]:
        """Weights of the norms of query and key heads, where the family has them."""
        return _head_norms(self._attention)

    def joint_product(self, normed_TE: Tensor) -> Tensor:
        """Queries, keys and values of a normed input before rotation, [T, N], without a gradient."""
        attention = self._attention
        weights = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        return _product(normed_TE, JointWeight(weights).join(weights), _joint_bias(attention))

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        paceline_plan: AttentionPlan | None = None,
        **unused: Any,
    ) -> Tensor:
        """What transformers calls in place of the layer's forward.

        Raises:
            UnsupportedAttentionError: no plan travels with the call, or a mask does.
        """
        if paceline_plan is None or attention_mask is not None:
            raise UnsupportedAttentionError("a fused layer needs an attention plan and takes no mask")
        assert position_embeddings is not None
        num_rows, length, _ = hidden_states.shape
        cos_TD, sin_TD = (
            part.expand(num_rows, -1, -1).reshape(num_rows * length, -1) for part in position_embeddings
        )
        layer, attention, parts = self._layer, self._attention, self.parts
        query_norm, key_norm = _head_norms(attention)
        query, key, value, residual_TE = _BeforeAttention.apply(
            hidden_states.reshape(num_rows * length, -1),
            cos_TD,
            sin_TD,
            parts,
            layer.input_layernorm.weight,
            query_norm,
            key_norm,
            _joint_bias(attention),
            attention.q_proj.weight,
            attention.k_proj.weight,
            attention.v_proj.weight,
        )
        args = self.attention_args()
        query, key, value = (
            part.unflatten(0, (num_rows, length)).transpose(1, 2) for part in (query, key, value)
        )
        attended_BTHD = paceline_plan.attend(query, key, value, args)
        out_TE = _AfterAttention.apply(
            residual_TE,
            attended_BTHD.reshape(num_rows * length, -1),
            parts,
            layer.post_attention_layernorm.weight,
            attention.o_proj.weight,
            layer.mlp.gate_proj.weight,
            layer.mlp.up_proj.weight,
            layer.mlp.down_proj.weight,
        )
        return out_TE.view_as(hidden_states)


def fuse_layers(module: PreTrainedModel, ops: Elementwise, adjacent: bool = True) -> FusionOutcome:
    """Replaces the forward of every decoder layer; says why not where the model has another form.

    `adjacent` lays query, key and value (gate and up) weights side by side in memory; leave it off where parameters
    are sharded or owned by someone who relies on their storage.
    """
    if reason := _unfusable(module):
        return FusionOutcome(0, reason)
    layers = _decoder_layers(module)
    for layer in layers:
        if adjacent:
            attention, mlp = layer.self_attn, layer.mlp
            lay_side_by_side([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
            lay_side_by_side([mlp.gate_proj.weight, mlp.up_proj.weight])
        layer.forward = FusedLayer(layer, ops, KeepPolicy())
    return FusionOutcome(len(layers), None)


@contextmanager
def stock_layers(layers: Sequence[nn.Module]) -> Iterator[None]:
    """transformers' own forward of these decoder layers in place of the fused one: the reference, without plans."""
    fused = {layer: layer.forward for layer in layers if isinstance(layer.forward, FusedLayer)}
    for layer in fused:
        del layer.forward
    try:
        yield
    finally:
        for layer, forward in fused.items():
            layer.forward = forward


def is_fused(layers: Sequence[nn.Module]) -> bool:
    """Whether all of these decoder layers are fused."""
    return all(isinstance(layer.forward, FusedLayer) for layer in layers)


def keep_policies(layers: Sequence[nn.Module]) -> list[KeepPolicy]:
    """The policy of every fused layer, to be changed in place."""
    return [layer.forward.parts.keep for layer in layers if isinstance(layer.forward, FusedLayer)]


def _decoder_layers(module: PreTrainedModel) -> list[Any]:
    base: Any = module.base_model
    return list(base.layers)


def _unfusable(module: PreTrainedModel) -> str | None:
    config = module.config
    if config.model_type not in FUSED_FAMILIES:
        return f"{config.model_type} layers have another form than {', '.join(FUSED_FAMILIES)}"
    if config.hidden_act != "silu":
        return f"the gate is {config.hidden_act}, not silu"
    layers = _decoder_layers(module)
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        plain = (attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        with_bias = (attention.q_proj, attention.k_proj, attention.v_proj)
        if any(type(linear) is not nn.Linear for linear in (*plain, *with_bias)):
            return "a projection is not a plain linear layer (adapters, quantised weights)"
        if any(linear.bias is not None for linear in plain):
            return "an output, gate, up or down projection has a bias"
    return None


def _head_norms(attention: Any) -> tuple[Tensor | None, Tensor | None]:
    """Qwen3 norms every query and key head; the other families' modules have no such part."""
    if attention.config.model_type != "qwen3":
        return None, None
    return attention.q_norm.weight, attention.k_norm.weight


def _window(attention: Any) -> int | None:
    """Tokens a query sees: Mistral keeps it in the config, Qwen per layer, Llama has none."""
    config = attention.config
    if config.model_type == "llama":
        return None
    window = config.sliding_window if config.model_type == "mistral" else attention.sliding_window
    assert window is None or isinstance(window, int)
    return window


def _joint_bias(attention: Any) -> Tensor | None:
    biases = [attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias]
    return None if biases[0] is None else torch.cat(biases)
