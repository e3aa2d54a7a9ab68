"""Case 7: packed, shared-prefix and padded rows give what one-by-one evaluation gives, in value and in gradient."""

import dataclasses

import pytest
import torch
from tiny_models import FAMILIES, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig, T5Config

from paceline.batching.prefixes import PackItem, build_pack
from paceline.model.attention import ATTENTION_NAME, UnsupportedAttentionError
from paceline.model.families import UnsupportedModelError, check_family
from paceline.model.fused import fuse_layers
from paceline.model.fused.layers import FUSED_FAMILIES, is_fused
from paceline.model.fused.reference import ReferenceElementwise
from paceline.model.inputs import packed_inputs, padded_inputs, score
from paceline.model.logprob_head import HeadSettings
from paceline.model.packed_attention import cut_pieces
from paceline.model.packing_probe import probe_packing

CPU = torch.device("cpu")
HEADER = tuple(range(10, 30))
ITEMS = [
    PackItem((*HEADER, 31, 32), ((40, 41, 42), (43,), (44, 45, 46, 47, 48))),
    PackItem((*HEADER, 33), ((50, 51), (52, 53, 54))),
]


def _settings(model, chunk=4):
    return HeadSettings(1.0, model.logit_softcap, chunk)


def _stock_logprobs(model, items):
    """Log-probs from the module's own forward pass with transformers' own attention, one sequence at a time."""
    model.module.set_attn_implementation("eager")
    found = []
    for item in items:
        for response in item.responses:
            ids = torch.tensor([[*item.prompt, *response]])
            log_p = model.module(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
            found.append(log_p[len(item.prompt) - 1 : -1].gather(-1, ids[0, len(item.prompt) :, None])[:, 0])
    model.module.set_attn_implementation(ATTENTION_NAME)
    return torch.cat(found)


def _gradients(model, logprobs):
    weights = torch.linspace(0.5, 1.5, len(logprobs))
    model.module.zero_grad()
    (weights * logprobs).sum().backward()
    return {name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_equal_one_by_one_evaluation_in_value_and_gradient(family, share):
    model = tiny_model(family)
    expected = _stock_logprobs(model, ITEMS)
    expected_gradients = _gradients(model, expected)
    found, _ = score(model, packed_inputs(build_pack(ITEMS, share_prefixes=share), CPU), _settings(model))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in _gradients(model, found).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("width", [27, 32, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_width_changes_nothing(family, width):
    model = tiny_model(family)
    pairs = [(item.prompt, response) for item in ITEMS for response in item.responses]
    found, _ = score(model, padded_inputs(pairs, width, CPU), _settings(model))
    torch.testing.assert_close(found, _stock_logprobs(model, ITEMS), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["shared", "packed", "padded-5", "padded-8"])
def test_neighbours_do_not_influence_one_another_and_only_real_targets_are_scored(layout):
    model = tiny_model()

    def logprobs(first):
        items = [PackItem(first[:1], (first[1:],)), PackItem((20,), ((21,),))]
        if layout.startswith("padded"):
            pairs = [(item.prompt, item.responses[0]) for item in items]
            return score(model, padded_inputs(pairs, int(layout[-1]), CPU), _settings(model))[0]
        pack = build_pack(items, share_prefixes=layout == "shared")
        return score(model, packed_inputs(pack, CPU), _settings(model))[0]

    before, after = logprobs((10, 11, 12)), logprobs((60, 61, 62))
    assert len(before) == 3  # targets 11, 12 and 21
    torch.testing.assert_close(
        before, _stock_logprobs(model, [PackItem((10,), ((11, 12),)), PackItem((20,), ((21,),))])
    )
    assert torch.equal(before[2], after[2])
    assert not torch.allclose(before[:2], after[:2])


def test_long_groups_are_cut_into_pieces_and_still_equal_one_by_one_evaluation():
    model = tiny_model("mistral")
    items = [PackItem(tuple(range(5, 45)), tuple(tuple(range(3 + k, 63 + k)) for k in range(4)))]
    pack = build_pack(items, share_prefixes=True)
    assert len(cut_pieces(pack.segments)) == 5  # one masked square would be mostly masked
    found, _ = score(model, packed_inputs(pack, CPU), _settings(model, chunk=64))
    torch.testing.assert_close(found, _stock_logprobs(model, items), rtol=1e-5, atol=1e-5)


def test_gradient_checkpointing_changes_nothing():
    model = tiny_model()
    inputs = packed_inputs(build_pack(ITEMS, share_prefixes=True), CPU)
    plain = _gradients(model, score(model, inputs, _settings(model))[0])
    model.module.train()
    model.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpointed = _gradients(model, score(model, inputs, _settings(model))[0])
    for name, gradient in plain.items():
        torch.testing.assert_close(checkpointed[name], gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tested_family_passes_the_probe(family):
    assert probe_packing(tiny_model(family)).max_difference < 1e-4


@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_fused_layers_are_probed_against_the_stock_ones_and_stay_fused(family):
    model = tiny_model(family)
    fuse_layers(model.module, ReferenceElementwise())
    result = probe_packing(model)
    assert 0.0 < result.max_difference < 1e-4
    assert is_fused(list(model.module.model.layers))


def test_the_probe_refuses_fused_layers_that_compute_something_else():
    model = tiny_model()
    fuse_layers(model.module, ReferenceElementwise())
    for layer in model.module.model.layers:
        layer.forward.parts = dataclasses.replace(layer.forward.parts, eps=1.0)
    with pytest.raises(UnsupportedModelError, match="silently change the loss"):
        probe_packing(model)


def test_the_probe_refuses_a_model_whose_logits_are_scaled_outside_the_head():
    model = tiny_model()
    model.module.lm_head.register_forward_hook(lambda module, inputs, logits: logits * 3.0)
    with pytest.raises(UnsupportedModelError, match="silently change the loss"):
        probe_packing(model)


@pytest.mark.parametrize(
    ("config", "reason"),
    [(MambaConfig(num_hidden_layers=1, hidden_size=8), "attention"), (T5Config(), "encoder-decoder")],
)
def test_a_family_that_cannot_be_packed_is_refused_with_a_reason(config, reason):
    module_class = AutoModelForCausalLM._model_mapping.get(type(config), torch.nn.Module)
    assert reason in check_family(config, module_class).refusal


def test_a_layer_type_with_a_state_along_the_row_is_refused():
    config = LlamaConfig()
    config.layer_types = ["linear_attention", "full_attention"]
    assert "linear_attention" in check_family(config, type(tiny_model().module)).refusal


def test_an_attention_argument_without_a_plan_is_an_error():
    model = tiny_model()
    layer = model.module.model.layers[0].self_attn
    hidden = torch.randn(1, 3, 48)
    rotary = model.module.model.rotary_emb(hidden, torch.arange(3)[None])
    with pytest.raises(UnsupportedAttentionError, match="no attention plan"):
        layer(hidden, position_embeddings=rotary, attention_mask=None)
    plan = packed_inputs(build_pack([PackItem((1, 2), ((3,),))], share_prefixes=True), CPU).plan
    with pytest.raises(UnsupportedAttentionError, match="s_aux"):
        layer(
            hidden, position_embeddings=rotary, attention_mask=None, paceline_plan=plan, s_aux=torch.ones(4)
        )
