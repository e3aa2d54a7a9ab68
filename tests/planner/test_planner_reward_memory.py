"""Models among a reward's sources in the run's estimate: what they hold, when, and what is not known of them."""

import pytest
import torch
from tiny_models import FAMILIES
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig

from paceline.bench.shapes import shape_config
from paceline.config import Config, load_config
from paceline.planner.memory import MemoryEstimate
from paceline.planner.memory_table import memory_table
from paceline.planner.model_shape import MemoryShape
from paceline.planner.run_facts import RunFacts
from paceline.planner.run_memory import estimate_run

ACTOR = MemoryShape.from_hf_config(shape_config("qwen3-1.7b").to_dict())
SMALL = MemoryShape.from_hf_config(shape_config("qwen3-0.6b").to_dict())


def config(kind: str, *overrides: str) -> Config:
    sections = {
        "model": {"path": "some/model"},
        "task": {"path": "prompts.jsonl"},
        "batch": {"token_budget": 16384},
        "cluster": {"device": "cuda"},
        "reward": {"sources": {"taste": {"kind": kind, "path": "other/model"}}},
    }
    return load_config(None, overrides, sections=sections)


def estimate(kind: str, *overrides: str, shape: MemoryShape | None = SMALL) -> MemoryEstimate:
    shapes = {} if shape is None else {"taste": shape}
    return estimate_run(config(kind, *overrides), RunFacts(ACTOR, 2, 512, source_shapes=shapes))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_a_classifier_holds_its_parameters_without_an_output_head(family):
    settings = FAMILIES[family]
    settings = type(settings)(**{**settings.to_dict(), "num_labels": 1})
    module = AutoModelForSequenceClassification.from_config(settings)
    shape = MemoryShape.from_hf_config(settings.to_dict())
    own = sum(p.numel() for name, p in module.named_parameters() if not name.startswith("score"))
    assert estimate("model", shape=shape).part("weights", "reward taste") == 2 * own


def test_its_weights_are_there_in_every_phase_unless_they_wait_on_the_host():
    def actor_peak(found: MemoryEstimate) -> float:
        return found.of_phase("actor", "layers")

    alone = estimate_run(
        load_config(
            None,
            [],
            sections={
                "model": {"path": "some/model"},
                "task": {"path": "prompts.jsonl"},
                "batch": {"token_budget": 16384},
                "cluster": {"device": "cuda"},
            },
        ),
        RunFacts(ACTOR, 2, 512),
    )
    kept, parked = estimate("model"), estimate("model", "reward.sources.taste.host_between_uses=true")
    assert actor_peak(kept) - actor_peak(alone) == kept.part("weights", "reward taste") > 0
    assert actor_peak(parked) == actor_peak(alone)
    assert parked.of_phase("reward taste", "scoring") == kept.of_phase("reward taste", "scoring")


def test_a_judge_holds_a_cache_for_the_verdicts_it_writes():
    few = estimate("judge", "reward.sources.taste.max_running=8")
    many = estimate("judge", "reward.sources.taste.max_running=16")
    assert many.part("KV cache", "reward taste") == 2 * few.part("KV cache", "reward taste") > 0


@pytest.mark.parametrize(("kind", "share"), [("int8", 0.5), ("nf4", 0.28125)])
def test_quantised_linear_weights_take_their_bits_and_the_embedding_stays(kind, share):
    whole = estimate("model").part("weights", "reward taste")
    small = estimate("model", f"reward.sources.taste.quantization={kind}").part("weights", "reward taste")
    embedding = 2 * SMALL.embedding_parameters
    assert small == pytest.approx(embedding + share * (whole - embedding))


def test_four_bit_blocks_are_as_wide_as_the_library_makes_them():
    pytest.importorskip("bitsandbytes")
    layer = torch.nn.Linear(256, 256, bias=False)
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(layer.weight.data, quant_type="nf4")
    assert not BitsAndBytesConfig(load_in_4bit=True).bnb_4bit_use_double_quant
    held = packed.numel() * packed.element_size() + state.absmax.numel() * state.absmax.element_size()
    assert held / layer.weight.numel() == pytest.approx(0.5 + 4 / 64)


def test_a_source_whose_config_nobody_can_read_is_named_as_left_out():
    table = memory_table(estimate("model", shape=None))
    assert "reward.sources.taste is not in it" in table
    assert "reward.sources.taste" not in memory_table(estimate("model"))
