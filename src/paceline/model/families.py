"""Which model families can run on attention plans, and why the others are refused."""

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from paceline.config.errors import ConfigError

TESTED_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text")
"""`model_type`s with an equality test of packed against one-by-one evaluation (tests/model)."""

_PLANNED_LAYERS = frozenset({"full_attention", "sliding_attention"})


class UnsupportedModelError(ConfigError):
    """The model cannot be trained here; a refusal of `model.path` that says why."""

    def __init__(self, path: str, rule: str) -> None:
        super().__init__("model.path", path, rule)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.value, self.rule)


@dataclass(frozen=True, slots=True)
class FamilyCheck:
    """Verdict on a model's family: `refusal` is None when it can run; `tested` when equality is in the tests."""

    model_type: str
    tested: bool
    refusal: str | None


def check_family(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> FamilyCheck:
    """Decides from the config and class alone, before weights are read."""
    return FamilyCheck(
        model_type=config.model_type,
        tested=config.model_type in TESTED_FAMILIES,
        refusal=_refusal(config, model_class),
    )


def _refusal(config: PretrainedConfig, model_class: type[PreTrainedModel]) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder model; only decoder-only causal models are supported"
    # transformers sets these two per class or per family; absence means the feature does not exist there
    layer_types = set(getattr(config, "layer_types", None) or [])
    if unplanned := sorted(layer_types - _PLANNED_LAYERS):
        return (
            f"its layers of type {', '.join(unplanned)} carry a state along the row, so packed neighbours would leak "
            "into one another; models with full or sliding attention can be used"
        )
    if not getattr(model_class, "_supports_attention_backend", False):
        return (
            f"{model_class.__name__} does not let its attention be replaced, so packed sequences would attend to one "
            "another"
        )
    return None
