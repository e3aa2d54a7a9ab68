"""Small random models whose heads are wide enough for vLLM's CPU kernels, with the tiny runs' tokenizer."""

from pathlib import Path

import torch
from tiny_runs import write_tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

_COMMON = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}

FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**_COMMON, head_dim=32, tie_word_embeddings=False),
}


def write_small_model(folder: Path, family: str = "llama", seed: int = 0) -> Path:
    """A Hugging Face folder: random float32 weights and a tokenizer of 97 words."""
    write_tiny_model(folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.float32).save_pretrained(folder)
    return folder
