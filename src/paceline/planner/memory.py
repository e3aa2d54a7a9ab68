"""Peak memory of one device from a run's settings.

A run's phases do not overlap: sampling, scoring, the head's turn of an update, the last and the first layer's turn of
its backward pass, the optimiser's step. What is always there plus the largest phase is the peak. A micro-batch meets
the gradients of those before it: none in the first, in the working dtype in the second, float32 sums from the third
on.

Letters: N parameters, V vocabulary, E hidden size, C tokens of a head chunk, R response tokens, T tokens of a
micro-batch, b bytes per element of the working dtype.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from paceline.planner.activations import LayerExecution, Recomputation, backward_bytes, kept_bytes
from paceline.planner.model_shape import MemoryShape

Phase = Literal[
    "always", "activations", "head", "layers", "end of backward", "optimizer", "scoring", "rollout"
]
"""An update's turns: the head's and the last layer's, with all activations there (`activations` counts in both), the
first layer's, with all gradients there, and the optimiser's step."""

GIB = 2**30
DEVICE_CONTEXT_BYTES = 0.75 * GIB
"""What a process takes of an accelerator before its first tensor."""

_FLOAT32 = 4
_COUNTED: dict[Phase, frozenset[Phase]] = {
    "head": frozenset({"activations", "head"}),
    "layers": frozenset({"activations", "layers"}),
    "end of backward": frozenset({"end of backward"}),
    "optimizer": frozenset({"optimizer"}),
    "scoring": frozenset({"scoring"}),
    "rollout": frozenset({"rollout"}),
}

OFFLOAD_WINDOW_BYTES = 2**30
"""Activations that may be on their way to the host at a time (`engine/activation_offload.py`)."""
OPTIMIZER_GROUP_BYTES = 2**28
"""Masters (and as many bytes of each moment) that the offloaded optimiser has on the device at a time; the next ones
are fetched and the last ones put away meanwhile (`engine/optimizer.py`)."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """How one model is divided: weights over `shard` ranks (FSDP, sequence-parallel ranks included) and `tensor`
    ranks. `gathered_layers` are whole at the same time."""

    shard: int = 1
    tensor: int = 1
    gathered_layers: int = 3


@dataclass(frozen=True, slots=True)
class HeadKind:
    """The log-prob head: tokens per chunk, and how it is computed. `kernels`: softmax and gradient in place, without
    copies of the logits; `one_pass`: with kernels, and gradients formed in the forward pass; neither: plain torch,
    where `plain` says that the logits are scored as they are (temperature 1, no cap)."""

    chunk: int = 1024
    kernels: bool = False
    one_pass: bool = False
    plain: bool = True
    entropy_grad: bool = False


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """Everything that memory of an updated model depends on; token counts are per device."""

    shape: MemoryShape
    token_budget: int
    response_tokens: int
    forward_token_budget: int
    how: LayerExecution = field(default_factory=LayerExecution)
    recompute: Recomputation = field(default_factory=Recomputation)
    head: HeadKind | None = field(default_factory=HeadKind)
    """None: a value head, whose memory is nothing beside the layers'."""
    sharding: Sharding = field(default_factory=Sharding)
    micro_batches: int = 3
    """Micro-batches of an update, as far as it matters: 1, 2, or more."""
    num_trained: int | None = None
    """Parameters that are trained where it is not all of them (adapters), beside the model's own."""
    optimizer_offload: bool = False
    activation_offload: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One line of the estimate. Roles take turns: only what is `always` there counts in another role's phase."""

    name: str
    num_bytes: float
    phase: Phase
    role: str = "actor"


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Parts and the peak that follows from them, in bytes per device. `notes` say what is not in it."""

    parts: tuple[Part, ...]
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> float:
        """What is always there plus the largest phase."""
        return max(self.of_phase(role, phase) for role, phase in self._peaks())

    @property
    def peak_phase(self) -> tuple[str, Phase]:
        """Role and phase that decide the total."""
        return max(self._peaks(), key=lambda peak: self.of_phase(*peak))

    def of_phase(self, role: str, phase: Phase) -> float:
        """Memory during one phase of one role."""
        return sum(
            part.num_bytes
            for part in self.parts
            if part.phase == "always" or (part.role == role and part.phase in _COUNTED[phase])
        )

    def part(self, name: str, role: str = "actor") -> float:
        """Bytes of the parts of that name together."""
        return sum(part.num_bytes for part in self.parts if part.name == name and part.role == role)

    def _peaks(self) -> list[tuple[str, Phase]]:
        roles = dict.fromkeys(part.role for part in self.parts)
        return [(role, phase) for role in roles for phase in _COUNTED]


def estimate_model(model: TrainedModel, role: str = "actor") -> tuple[Part, ...]:
    """Memory of one trained model and its passes."""
    own = divided(model.shape, model.sharding.tensor)
    parts = [*_states(model, own), *_update(model, own), *_scoring(model, own)]
    return tuple(replace(part, role=role) for part in parts)


def frozen_weights(shape: MemoryShape, element_bytes: int, sharding: Sharding) -> float:
    """A model that is only read, such as the reference."""
    return element_bytes * shape.num_parameters / sharding.tensor / sharding.shard


def kv_cache_bytes(shape: MemoryShape, element_bytes: int, num_slots: int, capacity: int) -> float:
    """Keys and values of `num_slots` samples of `capacity` tokens."""
    return 2.0 * shape.model.num_layers * shape.key_width * element_bytes * num_slots * capacity


def divided(shape: MemoryShape, tensor: int) -> MemoryShape:
    """What one tensor-parallel rank holds: its heads, its part of the MLP and of the vocabulary; norms are whole."""
    if tensor == 1:
        return shape
    model = shape.model
    return replace(
        shape,
        model=replace(
            model,
            num_heads=model.num_heads // tensor,
            num_kv_heads=max(1, model.num_kv_heads // tensor),
            intermediate_size=model.intermediate_size // tensor,
            moe_intermediate_size=model.moe_intermediate_size // tensor,
            shared_intermediate_size=model.shared_intermediate_size // tensor,
            vocab_size=-(-model.vocab_size // tensor),
        ),
    )


def _states(model: TrainedModel, own: MemoryShape) -> list[Part]:
    b, shard = model.how.element_bytes, model.sharding.shard
    is_divided = shard > 1 or model.sharding.tensor > 1
    num_own = own.num_parameters / shard
    num_trained = num_own if model.num_trained is None else model.num_trained / shard
    on_device = 0.0 if model.optimizer_offload else 1.0
    parts: list[Part] = []
    if model.num_trained is not None:
        parts.append(Part("weights", b * num_own, "always"))
        parts.append(Part("adapters", b * num_trained, "always"))
    elif not is_divided or b == _FLOAT32:
        parts.append(Part("weights", b * num_own, "always"))
    if b != _FLOAT32:
        # the shards of trained parameters are the masters: what is computed with is gathered from them
        stays = on_device if not is_divided else 1.0
        parts.append(Part("masters", stays * _FLOAT32 * num_trained, "always"))
    parts.append(Part("moments", on_device * 2 * _FLOAT32 * num_trained, "always"))
    before, after = _gradient_bytes(model)
    parts.append(Part("gradients of earlier micro-batches", before * num_trained, "activations"))
    parts.append(Part("gradients", after * num_trained, "end of backward"))
    parts.append(Part("gradients, summed", after * num_trained, "optimizer"))
    if model.optimizer_offload:
        largest = max(OPTIMIZER_GROUP_BYTES, _FLOAT32 * own.embedding_parameters)
        # one group is computed while the one before leaves and the next arrives; only one of them holds the largest
        streamed = min(largest + 2.0 * OPTIMIZER_GROUP_BYTES, _FLOAT32 * num_trained)
        parts.append(Part("streamed optimiser states", 3.0 * streamed, "optimizer"))
    if is_divided:
        root = own.embedding_parameters + own.head_parameters
        gathered = b * (root + model.sharding.gathered_layers * own.layer_parameters)
        parts.append(Part("gathered weights", gathered, "activations"))
        parts.append(Part("gathered weights", gathered, "end of backward"))
        parts.append(Part("unreduced gradients", b * own.layer_parameters, "layers"))
        parts.append(Part("weights gathered to sample", b * model.shape.num_parameters, "rollout"))
    return parts


def _gradient_bytes(model: TrainedModel) -> tuple[int, int]:
    """Bytes per trained parameter when the largest micro-batch's backward pass begins, and when it ends."""
    b = model.how.element_bytes
    if b == _FLOAT32 or model.sharding.shard > 1 or model.sharding.tensor > 1:
        return (0 if model.micro_batches == 1 else _FLOAT32), _FLOAT32
    return {1: (0, b), 2: (b, _FLOAT32)}.get(model.micro_batches, (_FLOAT32, _FLOAT32))


def _update(model: TrainedModel, own: MemoryShape) -> list[Part]:
    how, tokens = model.how, model.token_budget
    hidden, b = own.model.hidden_size, how.element_bytes
    kept = tokens * kept_bytes(own, how, model.recompute)
    if model.activation_offload:  # what is on its way out, and as much on its way back
        kept = min(kept, 2.0 * OFFLOAD_WINDOW_BYTES)
    # final norm, its output, rotary factors and positions
    outside = tokens * (
        (8 + 2 * b if own.float_norms else 4 + 2 * b) * hidden + 2 * b * own.model.head_dim + 24
    )
    tied = b * own.embedding_parameters if own.tied_head and model.num_trained is None and model.head else 0
    one_layer = tokens * kept_bytes(own, how, model.recompute) / own.model.num_layers
    one_layer += tokens * backward_bytes(own, how, model.recompute)
    parts = [
        Part("activations", kept, "activations"),
        Part("outside the layers", outside, "activations"),
        Part("backward pass of a layer", tokens * backward_bytes(own, how, model.recompute) + tied, "layers"),
        Part("first layer's backward pass", one_layer, "end of backward"),
    ]
    if model.head is not None:
        parts.append(Part("log-prob head", _head_update(model, own, model.head), "head"))
    return parts


def _head_update(model: TrainedModel, own: MemoryShape, head: HeadKind) -> float:
    """Response hidden states, their gradient, the weight's float32 gradient sum and one chunk's logits."""
    b, rows = model.how.element_bytes, model.response_tokens
    one_row = b * own.model.hidden_size * rows
    chunk = min(head.chunk, rows) * own.model.vocab_size
    weight = own.embedding_parameters if model.num_trained is None else 0
    if head.one_pass:  # the hidden states are gone when the weight's gradient is rounded
        return one_row + _FLOAT32 * weight + max(one_row + b * chunk, b * weight)
    forward = _head_forward(head, b) * chunk
    if head.kernels:
        backward = max(2 * b * chunk, b * weight)
    else:
        plain = 3 * b if head.plain and not head.entropy_grad else 24 if head.entropy_grad else 20
        backward = max(plain * chunk, b * chunk + b * weight)
    return one_row + max(forward, one_row + _FLOAT32 * weight + backward)


def _head_forward(head: HeadKind, b: int) -> float:
    """Bytes per logit at the head's widest point without gradients; two chunks of logits meet."""
    if head.kernels or head.one_pass:
        return 2.0 * b
    return 8.0 + b if head.plain else 12.0 + b


def _scoring(model: TrainedModel, own: MemoryShape) -> list[Part]:
    """A forward pass without gradients: a layer's widest point (the MLP) beside residual and input."""
    b, tokens, hidden = model.how.element_bytes, model.forward_token_budget, own.model.hidden_size
    width = max(3 * b * own.active_width, (8 + b) * hidden)
    body = tokens * (3 * b * hidden + width)
    head = 0.0
    if model.head is not None:
        rows = min(model.head.chunk, tokens)
        head = tokens * 2 * b * hidden + _head_forward(model.head, b) * rows * own.model.vocab_size
    return [Part("forward-only pass", max(body, head), "scoring")]
