"""Parameters of a decoder from its config.json, without loading it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.telemetry.flops import ModelShape

_HEAD_NORM_FAMILIES = frozenset({"qwen3", "qwen3_moe", "gemma3", "gemma3_text"})
_GEMMA_FAMILIES = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text"})
_FOUR_NORM_FAMILIES = frozenset({"gemma2", "gemma3", "gemma3_text"})
_QKV_BIAS_FAMILIES = frozenset({"qwen2", "qwen2_moe"})
_TIED_BY_DEFAULT = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text"})


@dataclass(frozen=True, slots=True)
class MemoryShape:
    """Sizes beyond `ModelShape` that memory depends on.

    `num_norms` per layer; `head_norms`: queries and keys are normed per head; `float_norms`: norm weights are applied
    in float32 (Gemma); `qkv_bias`: query, key and value products have a bias; `silu`: the
    gate is silu.
    """

    model: ModelShape
    tied_head: bool
    num_norms: int = 2
    head_norms: bool = False
    float_norms: bool = False
    qkv_bias: bool = False
    family: str = ""
    silu: bool = True
    max_context: int | None = None

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> "MemoryShape":
        """Reads a Hugging Face `config.json` (as a mapping); of a multimodal model, its text part.

        Raises:
            ValueError: a size is missing, or the model is built in a way that is not modelled.
        """
        text: Mapping[str, Any] = config.get("text_config") or config
        family = text.get("model_type")
        tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
        return cls(
            model=ModelShape.from_hf_config(text),
            tied_head=family in _TIED_BY_DEFAULT if tied is None else bool(tied),
            num_norms=4 if family in _FOUR_NORM_FAMILIES else 2,
            head_norms=family in _HEAD_NORM_FAMILIES,
            float_norms=family in _GEMMA_FAMILIES,
            family=family or "",
            silu=text.get("hidden_act", "silu") == "silu",
            qkv_bias=family in _QKV_BIAS_FAMILIES or bool(text.get("attention_bias")),
            max_context=text.get("max_position_embeddings"),
        )

    @property
    def query_width(self) -> int:
        """Heads x head width."""
        return self.model.num_heads * self.model.head_dim

    @property
    def key_width(self) -> int:
        """Kv heads x head width."""
        return self.model.num_kv_heads * self.model.head_dim

    @property
    def embedding_parameters(self) -> int:
        """The input embedding."""
        return self.model.vocab_size * self.model.hidden_size

    @property
    def head_parameters(self) -> int:
        """The output head where it is not the input embedding."""
        return 0 if self.tied_head else self.embedding_parameters

    @property
    def layer_parameters(self) -> int:
        """Parameters of the largest layer: all experts of a mixture, norms and biases included."""
        model, hidden = self.model, self.model.hidden_size
        attention = hidden * 2 * (self.query_width + self.key_width)
        vectors = self.num_norms * hidden + (2 * model.head_dim if self.head_norms else 0)
        vectors += self.query_width + 2 * self.key_width if self.qkv_bias else 0
        return attention + vectors + self._mlp_parameters(model.num_experts > 0)

    @property
    def num_parameters(self) -> int:
        """All parameters, a tied head counted once."""
        model = self.model
        dense_instead = 0
        if model.num_experts:
            saved = self._mlp_parameters(True) - self._mlp_parameters(False)
            dense_instead = model.num_dense_layers * saved
        layers = model.num_layers * self.layer_parameters - dense_instead
        return layers + self.embedding_parameters + self.head_parameters + model.hidden_size

    @property
    def active_width(self) -> int:
        """Width of the MLP that one token passes through; of a mixture, its experts' and the shared one's together."""
        model = self.model
        if not model.num_experts:
            return model.intermediate_size
        return model.num_experts_per_token * model.moe_intermediate_size + model.shared_intermediate_size

    def _mlp_parameters(self, mixture: bool) -> int:
        model, matrices = self.model, 3 if self.model.gated_mlp else 2
        if not mixture:
            return matrices * model.hidden_size * model.intermediate_size
        router = model.hidden_size * model.num_experts
        widths = model.num_experts * model.moe_intermediate_size + model.shared_intermediate_size
        return router + matrices * model.hidden_size * widths


def read_shape(model_path: str) -> MemoryShape | None:
    """Shape of a local model folder; None where there is no config.json to read (a Hugging Face id).

    Raises:
        ValueError: the config.json is not a model's, or not one that is modelled here.
    """
    path = Path(model_path).expanduser() / "config.json"
    if not path.is_file():
        return None
    stated = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(stated, dict):
        raise ValueError(f"{path} does not hold a model's settings")
    return MemoryShape.from_hf_config(stated)
