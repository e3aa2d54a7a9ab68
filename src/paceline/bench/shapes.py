"""Model shapes that benchmarks build with random weights: sizes as in the families' published configs."""

from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from paceline.config.errors import ConfigError

_QWEN3_VOCABULARY = 151_936
_QWEN3: dict[str, tuple[int, int, int, int, bool]] = {
    # hidden, layers, heads, intermediate, head tied to the embedding; 8 kv heads of width 128 everywhere
    "qwen3-0.6b": (1024, 28, 16, 3072, True),
    "qwen3-1.7b": (2048, 28, 16, 6144, True),
    "qwen3-4b": (2560, 36, 32, 9728, True),
    "qwen3-8b": (4096, 36, 32, 12288, False),
}
SHAPES = (*_QWEN3, "llama3-8b", "tiny")
"""`tiny` is no published model: it shows on any machine that a benchmark runs."""


def shape_config(name: str) -> PretrainedConfig:
    """The transformers config of a named shape.

    Raises:
        ConfigError: the name is not in `SHAPES`.
    """
    if name == "llama3-8b":
        return LlamaConfig(
            vocab_size=128_256,
            hidden_size=4096,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            intermediate_size=14_336,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
            max_position_embeddings=8192,
            tie_word_embeddings=False,
        )
    if name == "tiny":
        return Qwen3Config(
            vocab_size=512,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=128,
            tie_word_embeddings=True,
        )
    if name not in _QWEN3:
        raise ConfigError("--model", name, f"is none of the shapes {', '.join(SHAPES)}", "qwen3-1.7b")
    hidden, num_layers, num_heads, intermediate, tied = _QWEN3[name]
    return Qwen3Config(
        vocab_size=_QWEN3_VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=intermediate,
        tie_word_embeddings=tied,
        max_position_embeddings=40_960,
    )
