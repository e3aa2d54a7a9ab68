"""Bytes of activations that one token leaves in one decoder layer between its forward and backward pass.

Read off what autograd saves in transformers' Llama-like layers, storage by storage. With b bytes per element, E hidden
size, Q = query heads x head width, K = kv heads x head width, H query heads, I width of the MLP:

    RMSNorm        the float32 copy of its input (4 E), 1/rms (4), the normed input (b E), its output, which the
                   products after it save (b E)
    norm of heads  the same over Q and K, without an output of its own: it is rotated first
    attention      query, key, value and output (b each), log-sum-exp (4 H)
    gated MLP      gate, silu(gate), up and their product (4 b I)

Residual sums, rotary products and the results of the output and down products are saved by nobody.
"""

from dataclasses import dataclass
from typing import Literal

from paceline.config.schema import Recompute, SelectiveKeep
from paceline.planner.model_shape import MemoryShape

LayerKind = Literal["eager", "compiled", "fused"]
"""Who computes the layer: transformers' module, the same compiled, or paceline's fused kernels."""
AttentionKind = Literal["grouped", "repeated", "pieces"]
"""What attention saves: grouped kernels save kv heads as they are; others a copy per query head; the CPU's pieces
save their outputs once more, joined."""


@dataclass(frozen=True, slots=True)
class LayerExecution:
    """How a layer is computed. `element_bytes` of the working dtype; `frozen`: its own weights are not trained."""

    kind: LayerKind = "eager"
    attention: AttentionKind = "grouped"
    element_bytes: int = 2
    frozen: bool = False


@dataclass(frozen=True, slots=True)
class Recomputation:
    """`train.gradient_checkpointing` and what belongs to it."""

    choice: Recompute = "none"
    every: int = 2
    keep: SelectiveKeep = "matmuls"


def kept_bytes(shape: MemoryShape, how: LayerExecution, recompute: Recomputation) -> float:
    """Bytes per token kept over all layers."""
    whole, layer_input = layer_bytes(shape, how), how.element_bytes * shape.model.hidden_size
    num_layers = shape.model.num_layers
    if recompute.choice == "none":
        return num_layers * whole
    if recompute.choice == "all":
        return num_layers * layer_input
    if recompute.choice == "every_k":
        num_recomputed = num_layers // recompute.every
        return num_recomputed * layer_input + (num_layers - num_recomputed) * whole
    return num_layers * min(whole, selective_bytes(shape, how, recompute.keep))


def backward_bytes(shape: MemoryShape, how: LayerExecution, recompute: Recomputation) -> float:
    """Bytes per token that exist beside what is kept while the backward pass is inside one layer: what the layer
    computes again, and the gradients at its widest point, between the down product and the gate."""
    hidden, width, b = shape.model.hidden_size, shape.active_width, how.element_bytes
    gradients = b * (hidden + 2 * width) if how.kind == "eager" else b * (hidden + 3 * width)
    return gradients + _recomputed_at_once(shape, how, recompute)


def _recomputed_at_once(shape: MemoryShape, how: LayerExecution, recompute: Recomputation) -> float:
    nothing = recompute.choice == "every_k" and recompute.every > shape.model.num_layers
    if recompute.choice == "none" or nothing:
        return 0.0
    whole = layer_bytes(shape, how)
    if recompute.choice != "selective":
        return whole
    # what was kept is not formed a second time, where it is among what the layer needs
    b, width = how.element_bytes, shape.active_width
    if how.kind == "fused":
        normed = b * shape.model.hidden_size
        return normed + b * width * (1 if recompute.keep == "matmuls" else 3)
    attended = b * shape.query_width + 4 * shape.model.num_heads
    inner = (_mlp_tensors(shape) // 2) * width
    again = {
        "matmuls": attended + b * (shape.key_width + inner),
        "half_matmuls": attended + b * inner // 2,
        "attention": attended,
    }[recompute.keep]
    return whole - again


def layer_bytes(shape: MemoryShape, how: LayerExecution) -> float:
    """Bytes per token of one layer that recomputes nothing."""
    b, hidden = how.element_bytes, shape.model.hidden_size
    query, key, num_heads = shape.query_width, shape.key_width, shape.model.num_heads
    width = _mlp_tensors(shape) * shape.active_width
    attention = _attention_bytes(shape, how)
    if how.kind == "eager":
        norms = shape.num_norms * _norm_bytes(hidden, 1, shape, how) + 2 * b * hidden
        if shape.head_norms:
            norms += _norm_bytes(query, num_heads, shape, how)
            norms += _norm_bytes(key, shape.model.num_kv_heads, shape, how)
        return norms + attention + b * width
    before_rotation = b * (query + key) if shape.head_norms else 0
    if how.kind == "compiled":
        # silu(gate) is formed again; layer input, middle and both normed inputs are kept
        return 4 * b * hidden + before_rotation + attention + b * (width - shape.active_width)
    joint = b * (query + 2 * key) if shape.head_norms else 0
    return 4 * b * hidden + 8 + joint + attention + b * 3 * shape.active_width


def selective_bytes(shape: MemoryShape, how: LayerExecution, keep: SelectiveKeep) -> float:
    """Bytes per token of one layer under `selective`: its input, attention's result, and products as chosen."""
    b, hidden = how.element_bytes, shape.model.hidden_size
    query, key, width = shape.query_width, shape.key_width, shape.active_width
    if how.kind == "fused":
        # element-wise results are formed again; the gate-up product is kept by all, every second or no layer
        joint = b * (query + 2 * key) if shape.head_norms else 0
        kept = 2 * b * hidden + 8 + joint + _attention_bytes(shape, how)
        return kept + b * width * {"matmuls": 2, "half_matmuls": 1, "attention": 0}[keep]
    attended = b * hidden + b * query + 4 * shape.model.num_heads
    inner = (_mlp_tensors(shape) // 2) * width
    if keep == "attention":
        return attended
    if keep == "half_matmuls":  # of q k v o gate up down every second one
        return attended + b * (key + hidden + inner // 2)
    down = 0 if how.kind == "compiled" else hidden  # a compiler sees that nobody needs it
    return attended + b * (query + 2 * key + hidden + inner + down)


def _norm_bytes(width: int, num_norms: int, shape: MemoryShape, how: LayerExecution) -> float:
    """One RMSNorm over `width` values in `num_norms` parts, its output not counted."""
    if shape.float_norms:  # the weight is applied in float32, so the normed input is kept in float32
        return (4 if how.frozen else 8) * width + 4 * num_norms
    return (4 if how.frozen else 4 + how.element_bytes) * width + 4 * num_norms


def _attention_bytes(shape: MemoryShape, how: LayerExecution) -> float:
    b, query, key = how.element_bytes, shape.query_width, shape.key_width
    kept = {
        "grouped": 2 * query + 2 * key,
        "repeated": 4 * query,
        "pieces": 3 * query + 2 * key,
    }[how.attention]
    return b * kept + 4 * shape.model.num_heads


def _mlp_tensors(shape: MemoryShape) -> int:
    """Tensors of the MLP's width that are saved: gate, its activation, up, product; or input and activation."""
    return 4 if shape.model.gated_mlp else 2
