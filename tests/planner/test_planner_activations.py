"""Activation bytes as estimated against what autograd keeps on real models."""

import pytest
import torch
from saved_bytes import cached_by_selection, counting
from tiny_models import FAMILIES
from transformers import AutoModelForCausalLM

from paceline.batching.prefixes import PackItem, build_pack
from paceline.config.schema import TrainSection
from paceline.engine.recompute import apply_recompute, decoder_layers
from paceline.model.families import check_family
from paceline.model.fused.layers import FUSED_FAMILIES as FUSED_IN_THE_MODEL
from paceline.model.fused.layers import fuse_layers
from paceline.model.fused.reference import ReferenceElementwise
from paceline.model.inputs import packed_inputs, padded_inputs
from paceline.model.loading import CausalModel, wrap_model
from paceline.planner.activations import LayerExecution, Recomputation, kept_bytes
from paceline.planner.model_shape import MemoryShape
from paceline.planner.run_memory import FUSED_FAMILIES

CPU = torch.device("cpu")
NUM_TOKENS = 96


def model_of(family: str, dtype: torch.dtype) -> CausalModel:
    config = FAMILIES[family]
    module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return wrap_model(module, CPU, check_family(config, type(module)))


def counted_bytes(model: CausalModel, layout: str) -> int:
    """Kept inside the decoder layers alone: they see a hidden state, rotary factors and a plan."""
    ids = [i % 90 for i in range(NUM_TOKENS)]
    if layout == "padded":
        inputs = padded_inputs([(ids[:1], ids[1:])], NUM_TOKENS, CPU)
    else:
        items = [
            PackItem(tuple(ids[:20]), (tuple(ids[20:60]),)),
            PackItem(tuple(ids[1:10]), (tuple(ids[10:37]),)),
        ]
        inputs = packed_inputs(build_pack(items, False), CPU)
    body = model.module.base_model
    hidden = body.embed_tokens(inputs.input_ids_BT).detach().requires_grad_()
    rotary = rotary_of(model, hidden, inputs.position_ids_BT)
    with counting(model.module) as kept:
        for layer, position_embeddings in zip(body.layers, rotary, strict=True):
            hidden = layer(
                hidden,
                position_embeddings=position_embeddings,
                attention_mask=None,
                paceline_plan=inputs.plan,
            )
    kept.storages.update(cached_by_selection())
    shared = {t.untyped_storage().data_ptr() for pair in rotary for t in pair}
    return sum(t.untyped_storage().nbytes() for a, t in kept.storages.items() if a not in shared)


def rotary_of(model: CausalModel, hidden, position_ids):
    body = model.module.base_model
    if model.family.model_type == "gemma3_text":
        kinds = model.module.config.layer_types
        return [body.rotary_emb(hidden, position_ids, kind) for kind in kinds]
    return [body.rotary_emb(hidden, position_ids)] * len(body.layers)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize(
    "recompute",
    [
        Recomputation(),
        Recomputation("selective"),
        Recomputation("selective", keep="half_matmuls"),
        Recomputation("selective", keep="attention"),
        Recomputation("all"),
    ],
    ids=str,
)
def test_kept_bytes_of_fused_layers_are_estimated_within_a_tenth(family, recompute):
    model = model_of(family, torch.bfloat16)
    assert fuse_layers(model.module, ReferenceElementwise()).num_layers == 2
    settings = TrainSection(gradient_checkpointing=recompute.choice, selective_keep=recompute.keep)
    apply_recompute(decoder_layers(model.module, 2), settings)
    counted = counted_bytes(model, "padded")
    shape = MemoryShape.from_hf_config(model.module.config.to_dict())
    assert NUM_TOKENS * kept_bytes(shape, LayerExecution("fused"), recompute) == pytest.approx(
        counted, rel=0.1
    )


def test_the_planner_knows_the_families_whose_layers_are_fused():
    assert FUSED_FAMILIES == FUSED_IN_THE_MODEL


def estimated_bytes(model: CausalModel, layout: str, recompute: Recomputation) -> float:
    shape = MemoryShape.from_hf_config(model.module.config.to_dict())
    how = LayerExecution("eager", "grouped" if layout == "padded" else "pieces", model.dtype.itemsize)
    return NUM_TOKENS * kept_bytes(shape, how, recompute)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"gemma2"}))  # capped scores are kept whole
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_kept_bytes_of_every_family_are_estimated_within_a_tenth(family, dtype, layout):
    model = model_of(family, dtype)
    counted = counted_bytes(model, layout)
    assert estimated_bytes(model, layout, Recomputation()) == pytest.approx(counted, rel=0.1)


@pytest.mark.parametrize(
    "recompute",
    [
        Recomputation("all"),
        Recomputation("every_k", every=2),
        Recomputation("selective", keep="matmuls"),
        Recomputation("selective", keep="half_matmuls"),
        Recomputation("selective", keep="attention"),
    ],
    ids=str,
)
def test_kept_bytes_of_every_choice_are_estimated_within_a_tenth(recompute):
    model = model_of("qwen3", torch.bfloat16)
    settings = TrainSection(
        gradient_checkpointing=recompute.choice,
        checkpoint_every=recompute.every,
        selective_keep=recompute.keep,
    )
    layers = decoder_layers(model.module, model.shape.num_layers)
    apply_recompute(layers, settings)
    counted = counted_bytes(model, "padded")
    assert estimated_bytes(model, "padded", recompute) == pytest.approx(counted, rel=0.1)
