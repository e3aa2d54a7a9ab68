"""Tiny random models of every tested family, built from their configs."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from paceline.model.families import check_family
from paceline.model.loading import CausalModel, wrap_model

_COMMON = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}

FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_COMMON, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**_COMMON, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**_COMMON, head_dim=16),
    "mistral": MistralConfig(**_COMMON, sliding_window=6),
    "gemma2": Gemma2Config(
        **_COMMON, head_dim=16, sliding_window=6, query_pre_attn_scalar=16, final_logit_softcapping=5.0
    ),
    "gemma3_text": Gemma3TextConfig(
        **_COMMON,
        head_dim=16,
        sliding_window=6,
        query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


def tiny_model(
    family: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0, vocab_size: int | None = None
) -> CausalModel:
    """A model of the family with large random weights, so that a wrong mask shows."""
    config = FAMILIES[family]
    if vocab_size is not None:
        config = type(config)(**{**config.to_dict(), "vocab_size": vocab_size})
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return wrap_model(module, torch.device("cpu"), check_family(config, type(module)))
