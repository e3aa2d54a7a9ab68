"""FLOPs by the stated convention: the values of known reports, transformers' own modules, torch's own counter."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from paceline.telemetry.flops import (
    ModelShape,
    attention_flops,
    attention_pairs,
    forward_flops,
    mean_tokens_per_s,
    mfu,
    mfu_alarm,
    throughput,
    train_flops,
)

TWO_LAYERS = ModelShape(
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=128,
    vocab_size=1000,
)
PACKED = [(100, 0), (300, 0)]


def test_the_input_embedding_is_not_counted_and_the_head_is_counted_once():
    assert TWO_LAYERS.body_parameters == 73_728
    assert TWO_LAYERS.body_parameters + TWO_LAYERS.head_parameters == 137_728


def test_matmul_flops_of_two_packed_sequences():
    assert train_flops(TWO_LAYERS, PACKED, 400) - 3 * attention_flops(TWO_LAYERS, PACKED) == 330_547_200


def test_attention_of_a_packed_row_is_half_the_sum_of_squares_and_not_the_square_of_the_sum():
    assert 3 * attention_flops(TWO_LAYERS, PACKED) == 76_800_000
    assert 3 * attention_flops(TWO_LAYERS, [(400, 0)]) == 245_760_000 / 2


def test_mfu_of_the_packed_step_by_the_causal_convention():
    share = mfu(train_flops(TWO_LAYERS, PACKED, 400), 1e-3, 1, 1.0)
    assert share == pytest.approx(0.407, abs=5e-4)
    assert mfu_alarm(share) is None


def test_a_log_prob_pass_is_a_third_of_a_training_pass():
    assert forward_flops(TWO_LAYERS, PACKED, 400) * 3 == train_flops(TWO_LAYERS, PACKED, 400)


def test_the_head_is_counted_for_scored_tokens_only():
    saved = forward_flops(TWO_LAYERS, PACKED, 400) - forward_flops(TWO_LAYERS, PACKED, 150)
    assert saved == 2 * 250 * TWO_LAYERS.head_parameters


@pytest.mark.parametrize("cuts", [[50], [1, 2, 3], [64, 65]])
@pytest.mark.parametrize("window", [0, 7, 64, 1000])
def test_cutting_a_sequence_into_segments_changes_no_flops(cuts, window):
    edges = [0, *cuts, 100]
    pieces = [attention_pairs(b - a, a, window) for a, b in pairwise(edges)]
    assert sum(pieces) == pytest.approx(attention_pairs(100, 0, window))


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 250))
def test_a_window_bounds_the_pairs_as_counting_them_does(length, before, window):
    exact = sum(min(position + 0.5, window) for position in range(before, before + length))
    # a query half a token below the window's edge is where counting and the closed form may part
    assert attention_pairs(length, before, window) == pytest.approx(exact, abs=0.5)
    assert attention_pairs(length, before, window) <= attention_pairs(length, before)


def test_windowed_layers_attend_to_the_window_and_full_layers_to_everything():
    half = ModelShape(2, 64, 4, 2, 16, 128, 1000, sliding_window=32, num_windowed_layers=1)
    per_layer = attention_flops(TWO_LAYERS, [(256, 0)]) / 2
    windowed = per_layer * attention_pairs(256, 0, 32) / attention_pairs(256, 0)
    assert attention_flops(half, [(256, 0)]) == pytest.approx(per_layer + windowed)


def test_eight_experts_of_which_two_are_visited_count_two_and_the_router():
    sparse = ModelShape(
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=999,
        vocab_size=1000,
        num_experts=8,
        num_experts_per_token=2,
        moe_intermediate_size=128,
    )
    one_mlp, router = 3 * 64 * 128, 64 * 8
    assert sparse.body_parameters - TWO_LAYERS.body_parameters == 2 * (one_mlp + router)


SIZES = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 256,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
DENSE = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "mistral": {"head_dim": 16},
    "gemma2": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "starcoder2": {},
}


def linear_parameters(model):
    """Weights of every matrix multiplication but the output head."""
    head = model.get_output_embeddings()
    return sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    )


def build(family, **sizes):
    config = AutoConfig.for_model(family, **{**SIZES, **sizes})
    with torch.device("meta"):
        return config, AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", DENSE)
def test_body_parameters_are_those_of_the_real_modules(family):
    config, model = build(family, **DENSE[family])
    shape = ModelShape.from_hf_config(config.to_dict())
    assert shape.body_parameters == linear_parameters(model)
    assert shape.head_parameters == model.get_output_embeddings().weight.numel()


def test_dense_layers_among_sparse_ones_count_their_own_mlp():
    config, _ = build("qwen3_moe", head_dim=16, **EXPERTS, decoder_sparse_step=2, mlp_only_layers=[1])
    shape = ModelShape.from_hf_config(config.to_dict())
    assert shape.num_dense_layers == 3
    attention = 64 * 16 * 2 * (4 + 2)
    sparse = 64 * 8 + 2 * 3 * 64 * 48
    assert shape.body_parameters == 4 * attention + 3 * (3 * 64 * 96) + sparse


def test_mixtral_experts_have_the_width_of_the_mlp():
    config, _ = build("mixtral", num_local_experts=8, num_experts_per_tok=2)
    shape = ModelShape.from_hf_config(config.to_dict())
    assert (shape.num_experts, shape.num_experts_per_token, shape.moe_intermediate_size) == (8, 2, 96)


def test_shared_experts_are_visited_by_every_token():
    config = {**SIZES, "num_experts": 4, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    without = ModelShape.from_hf_config(config)
    shared = ModelShape.from_hf_config({**config, "shared_expert_intermediate_size": 40})
    assert shared.body_parameters - without.body_parameters == 4 * 3 * 64 * 40


def test_torchs_own_counter_agrees_on_a_forward_pass():
    config = AutoConfig.for_model("llama", **SIZES, attn_implementation="eager")
    model = AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_hf_config(config.to_dict())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(24)[None], use_cache=False)
    # eager attention computes the masked half too
    expected = forward_flops(shape, [(24, 0)], 24) + attention_flops(shape, [(24, 0)])
    assert counter.get_total_flops() == expected


def test_which_layers_have_a_window_is_read_from_the_config():
    gemma, _ = build("gemma2", head_dim=16, sliding_window=32)
    shape = ModelShape.from_hf_config(gemma.to_dict())
    assert (shape.sliding_window, shape.num_windowed_layers) == (32, 2)
    unused = ModelShape.from_hf_config({**SIZES, "sliding_window": 32, "use_sliding_window": False})
    assert (unused.sliding_window, unused.num_windowed_layers) == (0, 0)
    everywhere = ModelShape.from_hf_config({**SIZES, "model_type": "mistral", "sliding_window": 32})
    assert everywhere.num_windowed_layers == 4


def test_missing_and_null_sizes_take_their_published_defaults():
    sparse = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    shape = ModelShape.from_hf_config({**sparse, "head_dim": None})
    assert (shape.num_kv_heads, shape.head_dim) == (4, 16)


def test_the_text_part_of_a_multimodal_config_is_the_language_model():
    inner = ModelShape.from_hf_config(SIZES)
    assert ModelShape.from_hf_config({"text_config": SIZES, "vision_config": {"hidden_size": 5}}) == inner


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"])
def test_a_config_without_a_size_is_refused_by_its_name(key):
    with pytest.raises(ValueError, match=key):
        ModelShape.from_hf_config({name: value for name, value in SIZES.items() if name != key})


def test_layers_whose_flops_are_not_modelled_are_refused():
    with pytest.raises(ValueError, match="kv_lora_rank"):
        ModelShape.from_hf_config({**SIZES, "kv_lora_rank": 512})


def test_frozen_weights_have_no_weight_gradient_to_compute():
    matmul = forward_flops(TWO_LAYERS, PACKED, 400) - attention_flops(TWO_LAYERS, PACKED)
    expected = 2 * matmul + 3 * attention_flops(TWO_LAYERS, PACKED)
    assert train_flops(TWO_LAYERS, PACKED, 400, is_frozen=True) == expected


def test_unknown_hardware_has_no_mfu():
    assert mfu(1e12, 1.0, 1, None) is None
    assert mfu_alarm(None) is None


@pytest.mark.parametrize("value", [1.01, 2.5, math.inf, math.nan])
def test_an_mfu_that_cannot_be_raises_an_alarm_and_keeps_its_value(value):
    assert mfu_alarm(value) is not None
    assert mfu(2.5e12, 1.0, 1, 1.0) == 2.5


@pytest.mark.parametrize("seconds,devices,peak", [(0.0, 1, 1.0), (1.0, 0, 1.0), (1.0, 1, 0.0)])
def test_an_mfu_over_no_time_no_device_or_no_peak_is_refused(seconds, devices, peak):
    with pytest.raises(ValueError, match="positive"):
        mfu(1.0, seconds, devices, peak)


def test_ranks_that_share_a_sequence_count_its_tokens_once():
    four_devices = throughput([400, 400], 2.0, num_devices=4)  # sequence parallel 2: two data ranks
    assert four_devices.num_tokens == 800
    assert four_devices.tokens_per_s == 400
    assert four_devices.tokens_per_s_per_device == 100


def test_tokens_of_several_steps_are_taken_over_the_seconds_of_all_of_them():
    assert mean_tokens_per_s([(800, 2.0)] * 3) == 400
    assert mean_tokens_per_s([(100, 1.0), (100, 3.0)]) == 50
    assert mean_tokens_per_s([]) is None
