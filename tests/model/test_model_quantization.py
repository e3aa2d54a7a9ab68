"""Weights in 8 and 4 bits: real ones where the library has kernels, one refusal where it has none."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_reward_model import write_tiny_reward_model

from paceline.batching.prefixes import PackItem, build_pack
from paceline.config import ConfigError
from paceline.config.schema import ModelSection
from paceline.model.inputs import packed_inputs
from paceline.model.quantization import quantization_options
from paceline.model.value_head import ValueModel, load_reward_model, response_values

CPU = torch.device("cpu")
KEY = "reward.sources.rm.path"


def test_no_quantisation_needs_no_library() -> None:
    assert quantization_options("none", CPU, torch.float32, [], "k") == {}


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_without_the_library_one_refusal_names_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError) as caught:
        quantization_options(kind, CPU, torch.float32, [], "reward.sources.rm.quantization")  # type: ignore[arg-type]
    assert caught.value.key == "reward.sources.rm.quantization" and caught.value.nearest == "none"
    assert "paceline[quantized]" in caught.value.rule


def test_a_device_without_kernels_is_refused() -> None:
    pytest.importorskip("bitsandbytes")
    with pytest.raises(ConfigError, match=r"no kernels|nonsense") as caught:
        quantization_options("nf4", torch.device("meta"), torch.float32, [], "k")
    assert caught.value.nearest == "none"


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_quantised_scores_follow_those_of_the_full_weights(kind: str, tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "initializer_range": 0.05,
        "head_dim": 32,
    }
    settings = ModelSection(path=str(write_tiny_reward_model(tmp_path, **sizes)))
    full = load_reward_model(settings, CPU, KEY)
    small = load_reward_model(settings, CPU, KEY, kind)  # type: ignore[arg-type]
    linear = small.module.base_model.layers[0].mlp.up_proj
    kinds = {"int8": bitsandbytes.nn.Linear8bitLt, "nf4": bitsandbytes.nn.Linear4bit}
    assert isinstance(linear, kinds[kind]) and type(small.head) is torch.nn.Linear
    stored = linear.weight.numel() * linear.weight.element_size()
    assert stored == 128 * 256 // (1 if kind == "int8" else 2)
    expected, found = scores(full), scores(small)
    assert not np.array_equal(expected, found)
    assert np.corrcoef(expected, found)[0, 1] > 0.95


def test_layers_of_a_shape_without_kernels_are_refused_when_the_model_is_loaded(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    settings = ModelSection(
        path=str(write_tiny_reward_model(tmp_path))
    )  # 48 rows, and CPU kernels take 32 at a time
    with pytest.raises(ConfigError) as caught:
        load_reward_model(settings, CPU, KEY, "nf4")
    assert caught.value.key == "reward.sources.rm.quantization" and "q_proj" in caught.value.rule
    assert caught.value.nearest == "int8"


@torch.no_grad()
def scores(model: ValueModel) -> np.ndarray:
    """Of 24 random sequences, packed."""
    generator = np.random.default_rng(0)
    prompts = [tuple(generator.integers(3, 97, 12).tolist()) for _ in range(24)]
    pack = build_pack([PackItem(prompt, ((0,),)) for prompt in prompts], share_prefixes=False)
    return response_values(model, packed_inputs(pack, CPU)).numpy()
