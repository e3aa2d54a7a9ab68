"""FLOPs of a model by one stated convention, and the figures that rest on them: MFU and tokens per second.

Convention: model FLOPs, two per multiply-accumulate of every matrix multiplication that a token passes through. The
input embedding is a look-up and is not counted; the output head is counted for the tokens it is computed for, also
where it shares the embedding's weights; of a mixture of experts, the experts a token is routed to. Attention counts
what a causal mask lets through, segment by segment, never a packed row as one sequence. The backward pass costs twice
the forward pass; recomputing activations does the same work again and is not counted. Norms, activations, softmax
and sampling are left out. Torch-free.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Segment = tuple[int, int]
"""(length, tokens before it): tokens computed in one piece, and the tokens of the same sequence already computed
that they attend to (a shared prefix, a KV cache)."""

_BACKWARD_AND_FORWARD = 3
_UNGATED_FAMILIES = frozenset({"gpt_neox", "nemotron", "opt", "phi", "starcoder2"})
_UNMODELLED_KEYS = ("kv_lora_rank", "linear_num_value_heads", "ssm_state_size")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder from which parameters and FLOPs follow.

    `num_experts` is 0 for a dense model. In a mixture of experts, `num_dense_layers` layers keep a dense MLP of
    `intermediate_size`, and `shared_intermediate_size` is the width of the expert every token passes through.
    `num_windowed_layers` layers attend to the last `sliding_window` tokens only.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    gated_mlp: bool = True
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    num_dense_layers: int = 0
    shared_intermediate_size: int = 0
    sliding_window: int = 0
    num_windowed_layers: int = 0

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> "ModelShape":
        """Reads a Hugging Face `config.json` (as a mapping); of a multimodal model, its text part.

        Raises:
            ValueError: a size is missing, or the model is built in a way whose FLOPs are not modelled here.
        """
        config = config.get("text_config") or config
        for key in _UNMODELLED_KEYS:
            if config.get(key):
                raise ValueError(f"model config has {key}: the FLOPs of such layers are not modelled")
        num_heads = _size(config, "num_attention_heads")
        hidden_size = _size(config, "hidden_size")
        num_layers = _size(config, "num_hidden_layers")
        window, num_windowed = _window(config, num_layers)
        return cls(
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or hidden_size // num_heads,
            intermediate_size=_size(config, "intermediate_size"),
            vocab_size=_size(config, "vocab_size"),
            gated_mlp=config.get("model_type") not in _UNGATED_FAMILIES,
            sliding_window=window,
            num_windowed_layers=num_windowed,
            **_experts(config, num_layers),
        )

    @property
    def body_parameters(self) -> int:
        """Matrix-multiplication parameters a token passes through in all layers, embedding and head excluded."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        num_dense = self.num_dense_layers if self.num_experts else self.num_layers
        mlps = num_dense * self._mlp_parameters(self.intermediate_size)
        if self.num_experts:
            router = self.hidden_size * self.num_experts
            experts = self.num_experts_per_token * self._mlp_parameters(self.moe_intermediate_size)
            shared = self._mlp_parameters(self.shared_intermediate_size)
            mlps += (self.num_layers - num_dense) * (router + experts + shared)
        return self.num_layers * attention + mlps

    @property
    def head_parameters(self) -> int:
        """Parameters of the output head, passed through once per token that is scored."""
        return self.vocab_size * self.hidden_size

    def _mlp_parameters(self, width: int) -> int:
        return (3 if self.gated_mlp else 2) * self.hidden_size * width


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value <= 0:
        raise ValueError(f"model config: {key} = {value!r} must be a positive number")
    return value


def _window(config: Mapping[str, Any], num_layers: int) -> tuple[int, int]:
    """(sliding window, layers that have it); (0, 0) without one."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return 0, 0
    kinds = config.get("layer_types")
    return window, kinds.count("sliding_attention") if kinds else num_layers


def _experts(config: Mapping[str, Any], num_layers: int) -> dict[str, int]:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((config[name] for name in names if config.get(name)), 0)
    if not num_experts:
        return {}
    width = config.get("moe_intermediate_size") or _size(config, "intermediate_size")
    shared = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width
    first_dense = config.get("first_k_dense_replace") or 0
    period = config.get("decoder_sparse_step") or 1
    only_dense = set(config.get("mlp_only_layers") or ())
    num_dense = sum(
        layer < first_dense or layer in only_dense or (layer + 1) % period != 0 for layer in range(num_layers)
    )
    return {
        "num_experts": num_experts,
        "num_experts_per_token": _size(config, "num_experts_per_tok"),
        "moe_intermediate_size": width,
        "num_dense_layers": num_dense,
        "shared_intermediate_size": shared,
    }


def attention_pairs(length: int, before: int, window: int = 0) -> float:
    """Query-key pairs of a causal segment: length * before + length^2 / 2 (half the square, by convention, not
    length * (length + 1) / 2); with a `window` no query sees more than that many keys."""
    pairs = length * before + length * length / 2
    if window and before + length > window:
        beyond = before + length - max(before, window)  # queries that would see more than the window
        excess_first = max(before - window, 0)
        pairs -= beyond * excess_first + beyond * beyond / 2
    return pairs


def attention_flops(shape: ModelShape, segments: Iterable[Segment]) -> float:
    """Forward FLOPs of scores and weighted values, 4 * heads * head_dim per query-key pair and layer."""
    num_full = shape.num_layers - shape.num_windowed_layers
    pairs = 0.0
    for length, before in segments:
        pairs += num_full * attention_pairs(length, before)
        if shape.num_windowed_layers:
            pairs += shape.num_windowed_layers * attention_pairs(length, before, shape.sliding_window)
    return 4.0 * shape.num_heads * shape.head_dim * pairs


def forward_flops(shape: ModelShape, segments: Iterable[Segment], num_head_tokens: int) -> float:
    """FLOPs of a forward pass over `segments` of which `num_head_tokens` positions go through the output head."""
    segments = list(segments)
    num_tokens = sum(length for length, _ in segments)
    matmul = 2.0 * (shape.body_parameters * num_tokens + shape.head_parameters * num_head_tokens)
    return matmul + attention_flops(shape, segments)


def train_flops(
    shape: ModelShape, segments: Iterable[Segment], num_head_tokens: int, is_frozen: bool = False
) -> float:
    """FLOPs of forward and backward pass: three times the forward pass.

    With `is_frozen` weights (adapters are trained) no weight gradient is computed: matrix products count twice, and
    attention, which has no weights, three times. The adapters' own products are not counted.
    """
    segments = list(segments)
    forward = forward_flops(shape, segments, num_head_tokens)
    if not is_frozen:
        return _BACKWARD_AND_FORWARD * forward
    return 2.0 * forward + attention_flops(shape, segments)


def mfu(flops: float, seconds: float, num_devices: int, peak_tflops: float | None) -> float | None:
    """Model FLOPs utilisation: `flops` done by `num_devices` in `seconds` over what their peak allows.

    None where the peak is not known; it is never guessed. A value above 1 is returned as it is, so that it is seen:
    see `mfu_alarm`.

    Raises:
        ValueError: seconds, devices or peak are not positive.
    """
    if peak_tflops is None:
        return None
    if seconds <= 0 or num_devices <= 0 or peak_tflops <= 0:
        raise ValueError(
            f"MFU needs positive seconds, devices and peak: {seconds} s, {num_devices}, {peak_tflops} TFLOP/s"
        )
    return flops / (seconds * num_devices * peak_tflops * 1e12)


def mfu_alarm(value: float | None) -> str | None:
    """A sentence when an MFU cannot be true (above 1, or nan), else None; such a figure must not be trusted."""
    if value is None or value <= 1.0:
        return None
    return (
        f"MFU {value:.2f} cannot be: the FLOPs, the seconds or the peak it is computed from are wrong (ranks counted "
        "twice, a kernel not waited for, or the peak of another device or dtype)"
    )


@dataclass(frozen=True, slots=True)
class Throughput:
    """Tokens of all devices over one stretch of wall time."""

    num_tokens: int
    tokens_per_s: float
    tokens_per_s_per_device: float


def throughput(tokens_by_data_rank: Iterable[int], seconds: float, num_devices: int) -> Throughput:
    """Throughput of one step: the step's tokens over the step's own seconds.

    `tokens_by_data_rank` has one entry per data-parallel rank: devices that share sequences (sequence, tensor or
    pipeline parallel) hold the same tokens, which count once. `num_devices` counts them all.

    Raises:
        ValueError: seconds or devices are not positive.
    """
    if seconds <= 0 or num_devices <= 0:
        raise ValueError(f"throughput needs positive seconds and devices: {seconds} s, {num_devices}")
    num_tokens = sum(tokens_by_data_rank)
    return Throughput(num_tokens, num_tokens / seconds, num_tokens / seconds / num_devices)


def mean_tokens_per_s(steps: Iterable[tuple[int, float]]) -> float | None:
    """Tokens per second over several steps of (tokens, seconds): all tokens over all seconds. None over no time."""
    steps = list(steps)
    seconds = sum(duration for _, duration in steps)
    return sum(tokens for tokens, _ in steps) / seconds if seconds > 0 else None
