"""Load a Hugging Face causal language model so that training, scoring and generation share its parameters.

Shapes: B rows, T tokens of a row, E hidden size, V vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as hf_logging

from paceline.config.chat_template import read_chat_template
from paceline.config.errors import ConfigError
from paceline.config.schema import ModelSection
from paceline.model.attention import (
    ATTENTION_NAME,
    EXACT_ATTENTION_NAME,
    AttentionPlan,
    register_attention,
)
from paceline.model.cpu_linear import use_weight_first_products
from paceline.model.families import FamilyCheck, UnsupportedModelError, check_family
from paceline.model.hub import check_can_be_found
from paceline.model.parallel.groups import ALONE, ModelPeers
from paceline.telemetry.flops import ModelShape


@dataclass(frozen=True, slots=True)
class CausalModel:
    """A loaded model with the parts the trainer and the rollout engine both use."""

    module: PreTrainedModel
    device: torch.device
    dtype: torch.dtype
    shape: ModelShape
    max_context: int
    family: FamilyCheck
    peers: ModelPeers
    """The ranks that compute a forward pass together with this one."""
    root: nn.Module | None
    """With weights sharded over ranks: the module whose call gathers them (`call`)."""

    def call(self, body: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Runs `body`, which uses this model's parameters, with the sharded ones gathered as they are needed.

        Returned tensors are what a backward pass may start from.
        """
        if self.root is None:
            return body()
        found: tuple[Tensor, ...] = self.root(body)
        return found

    def hidden(self, input_ids_BT: Tensor, position_ids_BT: Tensor, plan: AttentionPlan) -> Tensor:
        """Last hidden states after the final norm, [B * T, E]."""
        out = self.module.base_model(
            input_ids=input_ids_BT, position_ids=position_ids_BT, use_cache=False, paceline_plan=plan
        )
        hidden: Tensor = out.last_hidden_state
        return hidden.flatten(0, 1)

    @property
    def head_weight_VE(self) -> Tensor:
        """The output embedding."""
        return self.module.get_output_embeddings().weight

    @property
    def head_bias_V(self) -> Tensor | None:
        """The output bias, where the model has one."""
        return self.module.get_output_embeddings().bias

    @property
    def is_exact(self) -> bool:
        """Whether `make_exact` has been here: log-probs of a token do not depend on what is computed beside it."""
        return bool(self.module.config._attn_implementation == EXACT_ATTENTION_NAME)

    @property
    def logit_softcap(self) -> float | None:
        """The cap on final logits (Gemma 2), None elsewhere."""
        # an attribute of some families' configs only
        return getattr(self.module.config, "final_logit_softcapping", None)


def resolve_device(device: str) -> torch.device:
    """`auto` is CUDA where present, else the CPU.

    Raises:
        ConfigError: CUDA was asked for and is not there.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("cluster.device", "cuda", "this machine shows no CUDA device to torch", "cpu")
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Working dtype for a device; see `model.dtype` in the config schema."""
    if dtype == "float32" or (dtype == "auto" and device.type == "cpu"):
        return torch.float32
    if dtype == "native" and device.type == "cpu" and not has_bf16_matrix_units():
        return torch.float32
    return torch.bfloat16


def has_bf16_matrix_units() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware tiles (Intel AMX)."""
    return bool(torch.cpu._is_amx_tile_supported())


def load_tokenizer(settings: ModelSection, section: str = "model") -> PreTrainedTokenizerBase:
    """The model's tokenizer, with the recipe's chat template if it names one. `section` is where its settings stand.

    Raises:
        ConfigError: the path holds no tokenizer.
    """
    path = settings.tokenizer_path or settings.path
    key = f"{section}.tokenizer_path" if settings.tokenizer_path else f"{section}.path"
    check_can_be_found(path, key, settings.revision)
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(key, path, f"no tokenizer can be loaded from it: {_first_line(error)}") from error
    if settings.chat_template is not None:
        tokenizer.chat_template = read_chat_template(settings.chat_template, f"{section}.chat_template")
    return tokenizer


def model_context(settings: ModelSection) -> int:
    """Longest sequence the model's own config states, in tokens, read without its weights.

    Raises:
        ConfigError: the path holds no model.
    """
    return int(load_hf_config(settings).get_text_config().max_position_embeddings)


def model_settings(settings: ModelSection) -> dict[str, Any]:
    """The model's own config.json, read without its weights.

    Raises:
        ConfigError: the path holds no model.
    """
    found: dict[str, Any] = load_hf_config(settings).to_dict()
    return found


def load_model(
    settings: ModelSection,
    device: torch.device,
    seed: int = 0,
    *,
    key: str = "model.path",
    options: Mapping[str, Any] | None = None,
) -> CausalModel:
    """Loads weights (or builds random ones from the config) in the working dtype, attention plans plugged in.

    `key` is the setting that a refusal names; `options` go to `from_pretrained`.

    Raises:
        ConfigError: the path holds no model.
        UnsupportedModelError: the family cannot run on attention plans.
    """
    config = load_hf_config(settings, key)
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not isinstance(model_class, type):
        raise UnsupportedModelError(
            settings.path, f"{config.model_type} has no causal language model in transformers"
        )
    family = check_family(config, model_class)
    if family.refusal is not None:
        raise UnsupportedModelError(settings.path, f"{config.model_type} cannot be used: {family.refusal}")
    dtype = resolve_dtype(settings.dtype, device)
    module = _build(settings, config, dtype, device, seed, options or {})
    return wrap_model(module, device, family, settings.max_context)


def wrap_model(
    module: PreTrainedModel, device: torch.device, family: FamilyCheck, max_context: int | None = None
) -> CausalModel:
    """Plugs attention plans into an already built module."""
    register_attention()
    module.set_attn_implementation(ATTENTION_NAME)
    module.eval()  # no dropout: old and new log-probs must come from the same function
    if device.type == "cpu" and has_bf16_matrix_units():
        use_weight_first_products(module)
    return CausalModel(
        module=module,
        device=device,
        dtype=module.dtype,
        shape=ModelShape.from_hf_config(module.config.to_dict()),
        max_context=min(max_context or 1 << 30, module.config.max_position_embeddings),
        family=family,
        peers=ALONE,
        root=None,
    )


def load_hf_config(settings: ModelSection, key: str = "model.path") -> PretrainedConfig:
    """The model's own config; `key` is the setting that a refusal names.

    Raises:
        ConfigError: the path holds no model.
    """
    check_can_be_found(settings.path, key, settings.revision)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            settings.path, revision=settings.revision, trust_remote_code=settings.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            key, settings.path, f"no model can be loaded from it: {_first_line(error)}"
        ) from error
    return config


def _build(
    settings: ModelSection,
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    options: Mapping[str, Any],
) -> PreTrainedModel:
    register_attention()
    hf_logging.disable_progress_bar()  # paceline shows its own progress
    common: dict[str, Any] = {"dtype": dtype, "trust_remote_code": settings.trust_remote_code, **options}
    if settings.random_weights:
        torch.manual_seed(seed)
        with device:
            module = AutoModelForCausalLM.from_config(config, **common)
    else:
        module = AutoModelForCausalLM.from_pretrained(settings.path, revision=settings.revision, **common)
    if "device_map" not in options:  # quantised layers are where they were loaded, and stay there
        module = module.to(device)
    return module


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
