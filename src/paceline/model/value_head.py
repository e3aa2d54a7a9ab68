"""A critic's model: the decoder with one number per position in place of the vocabulary.

It is transformers' sequence classifier of the model's family with one label. So a reward model loads with its head, a
critic saves as one, and the attention plans that the policy runs on serve it unchanged. The value of a response token
is read at the position that *predicts* it: the state before the action, the prompt's last token for the first.

Shapes: R response tokens, E hidden size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
from transformers.utils import logging as hf_logging

from paceline.config.errors import ConfigError
from paceline.config.reward_schema import Quantization
from paceline.config.schema import ModelSection
from paceline.model.attention import register_attention
from paceline.model.families import check_family
from paceline.model.inputs import ModelInputs, read_responses
from paceline.model.loading import CausalModel, load_hf_config, resolve_dtype, wrap_model
from paceline.model.quantization import check_quantized, quantization_options

HEAD_NAME = "score"
"""What every sequence classifier of transformers calls its head."""


@dataclass(frozen=True, slots=True)
class ValueModel(CausalModel):
    """A decoder with a scalar head. `head_is_new` says that its weights are not from the checkpoint but zeros."""

    head_is_new: bool

    @property
    def head(self) -> nn.Linear:
        """Hidden state to value, [1, E] without a bias."""
        head = self.module.get_submodule(HEAD_NAME)
        assert isinstance(head, nn.Linear)
        return head


def response_values(model: ValueModel, inputs: ModelInputs) -> Tensor:
    """Value before each response token, float32 [R], in units of reward.

    The product is taken in float32: bfloat16 near 1 knows values to 1/256 only, and differences of values are what an
    advantage is made of.
    """
    (value_R,) = read_responses(model, inputs, partial(_value_head, model))
    return value_R


def _value_head(model: ValueModel, hidden_RE: Tensor, targets_R: Tensor) -> tuple[Tensor, ...]:
    """The same on all tensor-parallel ranks, which hold the whole head: a value does not depend on the token."""
    weight_1E = model.head.weight
    return (nn.functional.linear(hidden_RE.float(), weight_1E.float()).squeeze(-1),)


def load_reward_model(
    settings: ModelSection, device: torch.device, key: str, quantization: Quantization = "none"
) -> ValueModel:
    """Loads a sequence classifier with one label, head included, to be read only. `key` is the setting of its path.

    Raises:
        ConfigError: see `load_value_model`; or the checkpoint has no head, so there is nothing that scores; or this
            platform cannot quantise.
    """
    dtype = resolve_dtype(settings.dtype, device)
    setting = f"{key.rpartition('.')[0]}.quantization"
    options = quantization_options(quantization, device, dtype, [HEAD_NAME], setting)
    model = load_value_model(settings, device, key=key, role="reward model", options=options)
    check_quantized(model.module, quantization, device, setting)
    if model.head_is_new:
        rule = "holds a language model without a scalar head, which scores nothing"
        raise ConfigError(key, settings.path, rule, "a source of kind judge, which asks a language model")
    return model


def load_value_model(
    settings: ModelSection,
    device: torch.device,
    seed: int = 0,
    key: str = "critic.path",
    *,
    role: str = "critic",
    options: Mapping[str, Any] | None = None,
) -> ValueModel:
    """Loads a language model, or a sequence classifier with one label, as a value model on attention plans.

    A head that the checkpoint does not hold is zeros, so that every value starts at 0 whatever the seed. `key` is the
    setting that a refusal names and `role` what the model is for; `options` go to `from_pretrained`.

    Raises:
        ConfigError: the path holds no model, one whose weights do not fit a decoder with a scalar head, or one of a
            family that has no sequence classifier or cannot run on attention plans.
    """
    config = load_hf_config(settings, key)
    model_class = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    if not isinstance(model_class, type):
        rule = f"{config.model_type} has no sequence classifier in transformers, which a {role} is"
        raise ConfigError(key, settings.path, rule)
    family = check_family(config, model_class)
    if family.refusal is not None:
        raise ConfigError(key, settings.path, f"{config.model_type} cannot be used: {family.refusal}")
    _check_num_labels(config, settings.path, key, role)
    module, head_is_new = _build(settings, config, device, seed, key, options or {})
    return as_value_model(wrap_model(module, device, family, settings.max_context), head_is_new)


def as_value_model(model: CausalModel, head_is_new: bool) -> ValueModel:
    """The same model, a sequence classifier with one label, seen as what gives values."""
    common = {field.name: getattr(model, field.name) for field in fields(CausalModel)}
    # the head is one row, not a vocabulary: FLOPs of a critic's passes count it as such
    common["shape"] = replace(model.shape, vocab_size=1)
    return ValueModel(**common, head_is_new=head_is_new)


def _check_num_labels(config: PretrainedConfig, path: str, key: str, role: str) -> None:
    # config.num_labels is 2 for every language model, so only a classifier's says something
    is_classifier = any("Classification" in name for name in config.architectures or [])
    if is_classifier and config.num_labels != 1:
        rest = " or from a language model" if role == "critic" else ""
        rule = f"its classifier has {config.num_labels} labels; a {role} starts from one label{rest}"
        raise ConfigError(key, path, rule)


def _build(
    settings: ModelSection,
    config: PretrainedConfig,
    device: torch.device,
    seed: int,
    key: str,
    options: Mapping[str, Any],
) -> tuple[PreTrainedModel, bool]:
    register_attention()
    hf_logging.disable_progress_bar()  # paceline shows its own progress
    common: dict[str, Any] = {
        "dtype": resolve_dtype(settings.dtype, device),
        "trust_remote_code": settings.trust_remote_code,
        **options,
    }
    config.num_labels = 1
    if settings.random_weights:
        torch.manual_seed(seed)
        with device:
            module = AutoModelForSequenceClassification.from_config(config, **common)
        head_is_new = True
    else:
        module, head_is_new = _read(settings, config, common, key)
    if head_is_new:
        nn.init.zeros_(module.get_submodule(HEAD_NAME).weight)
    if "device_map" not in options:  # quantised layers are where they were loaded, and stay there
        module = module.to(device)
    return module, head_is_new


def _read(
    settings: ModelSection, config: PretrainedConfig, common: dict[str, Any], key: str
) -> tuple[PreTrainedModel, bool]:
    """Weights from the checkpoint, all of them used but a language model's output embedding."""
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # its warning of a new head is what `head_is_new` and the checks below are for
    try:
        module, found = AutoModelForSequenceClassification.from_pretrained(
            settings.path, revision=settings.revision, config=config, output_loading_info=True, **common
        )
    except (OSError, RuntimeError) as error:
        raise ConfigError(
            key, settings.path, f"no sequence classifier can be loaded from it: {error}"
        ) from error
    finally:
        hf_logging.set_verbosity(verbosity)
    missing = set(found["missing_keys"])
    unused = {name for name in found["unexpected_keys"] if not name.startswith("lm_head.")}
    head = f"{HEAD_NAME}.weight"
    if missing - {head}:
        rule = f"it lacks weights of {config.model_type}: {_listed(missing - {head})}"
        raise ConfigError(key, settings.path, rule)
    if unused:
        rule = f"it holds weights that a scalar head without a bias has no place for: {_listed(unused)}"
        raise ConfigError(key, settings.path, rule)
    return module, head in missing


def _listed(names: set[str]) -> str:
    shown = sorted(names)[:4]
    return ", ".join(shown) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
