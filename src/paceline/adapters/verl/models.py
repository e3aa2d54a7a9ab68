"""Shapes of published models by name, for rules that need heads, experts or the vocabulary.

Figures are those of each model's own config.json. A local folder's config.json is read instead when it is there.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class KnownModel:
    """Attention heads, key-value heads, vocabulary, experts (0: dense) and parameters in billions (None: unknown)."""

    num_heads: int
    num_kv_heads: int
    vocabulary: int
    num_experts: int
    billions: float | None


_KNOWN: tuple[tuple[str, KnownModel], ...] = (
    (r"qwen2\.?5?-0\.5b", KnownModel(14, 2, 151_936, 0, 0.5)),
    (r"qwen2\.?5?-(?:math-|coder-|vl-)?1\.5b", KnownModel(12, 2, 151_936, 0, 1.5)),
    (r"qwen2\.5-(?:coder-|vl-)?3b", KnownModel(16, 2, 151_936, 0, 3.1)),
    (r"qwen2\.?5?-(?:math-|coder-|vl-)?7b", KnownModel(28, 4, 152_064, 0, 7.6)),
    (r"qwen2\.5-(?:coder-)?14b", KnownModel(40, 8, 152_064, 0, 14.8)),
    (r"qwen2\.5-(?:coder-|vl-)?32b", KnownModel(40, 8, 152_064, 0, 32.8)),
    (r"qwen2\.?5?-(?:math-|vl-)?72b", KnownModel(64, 8, 152_064, 0, 72.7)),
    (r"qwen3-0\.6b", KnownModel(16, 8, 151_936, 0, 0.6)),
    (r"qwen3-1\.7b", KnownModel(16, 8, 151_936, 0, 1.7)),
    (r"qwen3-4b", KnownModel(32, 8, 151_936, 0, 4.0)),
    (r"qwen3-8b", KnownModel(32, 8, 151_936, 0, 8.2)),
    (r"qwen3-14b", KnownModel(40, 8, 151_936, 0, 14.8)),
    (r"qwen3-32b", KnownModel(64, 8, 151_936, 0, 32.8)),
    (r"qwen3-30b-a3b", KnownModel(32, 4, 151_936, 128, 30.5)),
    (r"qwen3-235b-a22b", KnownModel(64, 4, 151_936, 128, 235.0)),
    (r"llama-?3\.2-1b", KnownModel(32, 8, 128_256, 0, 1.2)),
    (r"llama-?3\.2-3b", KnownModel(24, 8, 128_256, 0, 3.2)),
    (r"llama-?3(?:\.1)?-8b", KnownModel(32, 8, 128_256, 0, 8.0)),
    (r"llama-?3(?:\.[13])?-70b", KnownModel(64, 8, 128_256, 0, 70.6)),
    (r"mistral-7b", KnownModel(32, 8, 32_768, 0, 7.2)),
    (r"deepseek-llm-7b", KnownModel(32, 32, 102_400, 0, 7.0)),
    (r"deepseek-(?:v3|r1)(?!-distill)", KnownModel(128, 128, 129_280, 256, 671.0)),
    (r"gemma-2-2b", KnownModel(8, 4, 256_000, 0, 2.6)),
    (r"gemma-2-9b", KnownModel(16, 8, 256_000, 0, 9.2)),
    (r"smollm2-135m", KnownModel(9, 3, 49_152, 0, 0.135)),
    (r"smollm2-360m", KnownModel(15, 5, 49_152, 0, 0.36)),
    (r"smollm2-1\.7b", KnownModel(32, 32, 49_152, 0, 1.7)),
)
_DISTILL = re.compile(r"deepseek-r1-distill-qwen-(1\.5|7|14|32)b")


def known_model(path: str) -> KnownModel | None:
    """The model at `path` (an id or a folder), or None when neither a config.json nor its name says what it is."""
    config = Path(path).expanduser() / "config.json"
    if config.is_file():
        return _from_config(config)
    name = path.rstrip("/").lower().replace("_", "-")
    if match := _DISTILL.search(name):
        name = f"qwen2.5-{match.group(1)}b"
    return next((model for pattern, model in _KNOWN if re.search(pattern, name)), None)


def _from_config(path: Path) -> KnownModel | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("num_attention_heads"), int):
        return None
    heads = content["num_attention_heads"]
    experts = (
        content.get("num_experts") or content.get("n_routed_experts") or content.get("num_local_experts") or 0
    )
    return KnownModel(
        heads, content.get("num_key_value_heads") or heads, content.get("vocab_size") or 0, experts, None
    )


def allowed_sequence_parallel(model: KnownModel) -> list[int]:
    """Ulysses sizes: each divides the heads, and it and the key-value heads divide one another (those are repeated)."""
    return [
        size
        for size in range(1, model.num_heads + 1)
        if model.num_heads % size == 0 and (model.num_kv_heads % size == 0 or size % model.num_kv_heads == 0)
    ]
