"""A decoding round's forward pass through fused layers: the trainer's own weights, the layer's pieces side by side.

What `model/fused/layers.py` computes in two differentiable functions per layer is written here without gradients and
across layers: the residual is added inside the next norm, and keys and values go straight to their pages.

Shapes: R rows, E hidden size, N joint columns, H query heads, D head width.
"""

from typing import Any

from torch import Tensor

from paceline.model.fused.layers import FusedLayer, JointWeight, is_fused
from paceline.model.loading import CausalModel
from paceline.rollout.native.paged.attention import PagedAttention
from paceline.rollout.native.paged.cache import PagedCache
from paceline.rollout.native.paged.device import DeviceRows
from paceline.rollout.native.paged.kernels import RotateAndStore


def can_decode_fused(model: CausalModel) -> bool:
    """Whether the model's layers are fused, so that `fused_hidden` applies."""
    return is_fused(list(getattr(model.module.base_model, "layers", [])))  # some families name them otherwise


def fused_hidden(
    model: CausalModel,
    tokens_R: Tensor,
    rows: DeviceRows,
    cache: PagedCache,
    attention: PagedAttention,
    rotate_and_store: RotateAndStore,
) -> Tensor:
    """Last hidden states after the final norm, [R, E]; equals `model.hidden` on a `PagedPlan` of the same rows."""
    base: Any = model.module.base_model
    x_RE: Tensor = base.embed_tokens(tokens_R)
    cos_1RD, sin_1RD = base.rotary_emb(x_RE[None], rows.positions_R[None])
    cos_RD, sin_RD = cos_1RD[0].contiguous(), sin_1RD[0].contiguous()
    decode_rows = rows.decode_rows(cache.page_tokens)
    residual_RE: Tensor | None = None
    ops = base.layers[0].forward.parts.ops
    for index, layer in enumerate(base.layers):
        fused: FusedLayer = layer.forward
        parts = fused.parts
        total_RE, normed_RE, _ = ops.add_rms_norm(x_RE, residual_RE, layer.input_layernorm.weight, parts.eps)
        qkv_RN = fused.joint_product(normed_RE)
        pages = cache.layer(index)
        query_norm, key_norm = fused.head_norms()
        query_RHD = rotate_and_store(qkv_RN, query_norm, key_norm, cos_RD, sin_RD, parts.layout, pages, rows)
        attended_RHD = attention.decode(query_RHD, pages, decode_rows, fused.attention_args())
        projected_RE = attended_RHD.flatten(1) @ layer.self_attn.o_proj.weight.T
        residual_RE, normed_RE, _ = ops.add_rms_norm(
            projected_RE, total_RE, layer.post_attention_layernorm.weight, parts.eps
        )
        gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
        gated_RI = ops.gate(normed_RE @ JointWeight((gate, up)).join((gate, up)).T)
        x_RE = gated_RI @ layer.mlp.down_proj.weight.T
    _, last_RE, _ = ops.add_rms_norm(x_RE, residual_RE, base.norm.weight, base.norm.variance_epsilon)
    return last_RE
