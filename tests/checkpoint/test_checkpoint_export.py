"""The export loads as a Hugging Face folder, and appears complete or not at all."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from paceline.checkpoint import NonFiniteStateError, export_hf


def tiny_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")


def test_an_export_replaces_the_one_before_and_loads(tmp_path: Path) -> None:
    target = tmp_path / "export"
    for seed in (0, 1):
        model = tiny_model(seed)
        assert export_hf(model, tiny_tokenizer(), target) == target
        loaded = AutoModelForCausalLM.from_pretrained(target)
        for name, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor)
    assert AutoTokenizer.from_pretrained(target)("a b").input_ids == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_non_finite_weights_are_not_exported(tmp_path: Path) -> None:
    model = tiny_model(0)
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(NonFiniteStateError, match=r"norm\.weight"):
        export_hf(model, tiny_tokenizer(), tmp_path / "export")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_export_leaves_nothing_and_keeps_the_one_before(tmp_path: Path) -> None:
    class Broken(PreTrainedTokenizerFast):
        def save_pretrained(self, *args: object, **kwargs: object) -> tuple[str, ...]:
            raise OSError("disk full")

    export_hf(tiny_model(0), tiny_tokenizer(), tmp_path / "export")
    broken = Broken(tokenizer_object=Tokenizer(WordLevel({"?": 0}, unk_token="?")))
    with pytest.raises(OSError, match="disk full"):
        export_hf(tiny_model(1), broken, tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
