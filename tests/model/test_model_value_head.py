"""Values are the state's before each action, the same in every layout; critics load from what people have."""

from dataclasses import replace

import pytest
import torch
from tiny_models import FAMILIES, tiny_model
from tiny_runs import write_tiny_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    MambaConfig,
)

from paceline.batching.prefixes import PackItem, build_pack
from paceline.config import ConfigError
from paceline.config.schema import ModelSection
from paceline.model.attention import ATTENTION_NAME
from paceline.model.fused import fuse_layers
from paceline.model.fused.reference import ReferenceElementwise
from paceline.model.inputs import packed_inputs, padded_inputs
from paceline.model.packing_probe import probe_value_packing
from paceline.model.value_head import load_value_model, response_values

CPU = torch.device("cpu")
HEADER = tuple(range(10, 30))
ITEMS = [
    PackItem((*HEADER, 31, 32), ((40, 41, 42), (43,), (44, 45, 46, 47, 48))),
    PackItem((*HEADER, 33), ((50, 51), (52, 53, 54))),
]
PAIRS = [(item.prompt, response) for item in ITEMS for response in item.responses]


def critic_of(tmp_path, family="llama", dtype="float32"):
    """A value model whose head says something."""
    path = tmp_path / family
    tiny_model(family).module.save_pretrained(path)
    model = load_value_model(ModelSection(path=str(path), dtype=dtype), CPU)
    torch.nn.init.normal_(model.head.weight, std=0.3, generator=torch.Generator().manual_seed(1))
    return model


def stock_values(model):
    """From transformers' own attention, one sequence at a time, at the position before each response token."""
    model.module.set_attn_implementation("eager")
    found = []
    for prompt, response in PAIRS:
        hidden = model.module.base_model(torch.tensor([[*prompt, *response]]), use_cache=False)
        found.append(model.head(hidden.last_hidden_state[0])[len(prompt) - 1 : -1, 0])
    model.module.set_attn_implementation(ATTENTION_NAME)
    return torch.cat(found)


def gradients(model, values):
    model.module.zero_grad()
    (torch.linspace(0.5, 1.5, len(values)) * values).sum().backward()
    return {name: p.grad.clone() for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("layout", ["shared prefixes", "packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_equal_one_by_one_evaluation_in_value_and_gradient(tmp_path, family, layout):
    model = critic_of(tmp_path, family)
    expected = stock_values(model)
    expected_gradients = gradients(model, expected)
    if layout == "padded":
        inputs = padded_inputs(PAIRS, 32, CPU)
    else:
        inputs = packed_inputs(build_pack(ITEMS, share_prefixes=layout == "shared prefixes"), CPU)
    found = response_values(model, inputs)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(model, found).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_fused_layers_give_the_same_values_and_gradients(tmp_path, family):
    model = critic_of(tmp_path, family)
    inputs = packed_inputs(build_pack(ITEMS, share_prefixes=True), CPU)
    expected = response_values(model, inputs)
    expected_gradients = gradients(model, expected)
    assert fuse_layers(model.module, ReferenceElementwise()).num_layers == 2
    found = response_values(model, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(model, found).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tested_family_passes_the_probe_of_its_states_fused_or_not(tmp_path, family):
    model = critic_of(tmp_path, family)
    probe_value_packing(model)
    fuse_layers(model.module, ReferenceElementwise())
    probe_value_packing(model)


def test_the_probe_of_states_sees_what_a_new_head_of_zeros_would_hide(tmp_path):
    write_tiny_model(tmp_path / "lm")
    model = load_value_model(ModelSection(path=str(tmp_path / "lm")), CPU)
    fuse_layers(model.module, ReferenceElementwise())
    for layer in model.module.model.layers:
        layer.forward.parts = replace(layer.forward.parts, eps=1.0)
    with pytest.raises(ConfigError, match="silently change the values") as caught:
        probe_value_packing(model)
    assert caught.value.key == "critic.path"


def test_a_value_does_not_see_the_token_it_comes_before_or_any_later_one(tmp_path):
    model = critic_of(tmp_path)
    before = response_values(model, padded_inputs([((3, 4, 5), (6, 7, 8))], 6, CPU))
    after = response_values(model, padded_inputs([((3, 4, 5), (6, 70, 80))], 6, CPU))
    torch.testing.assert_close(after[:2], before[:2])
    assert (after[2] - before[2]).abs().item() > 1e-3


def test_the_value_of_bfloat16_weights_is_not_rounded_to_bfloat16(tmp_path):
    model = critic_of(tmp_path, dtype="bfloat16")
    values = response_values(model, padded_inputs(PAIRS, 32, CPU))
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


def test_a_critic_from_a_language_model_starts_at_zero_and_has_its_decoder(tmp_path):
    write_tiny_model(tmp_path / "lm")
    model = load_value_model(ModelSection(path=str(tmp_path / "lm")), CPU, seed=3)
    assert model.head_is_new
    assert not response_values(model, padded_inputs(PAIRS, 32, CPU)).any()
    policy = tiny_model()
    for name, parameter in policy.module.base_model.named_parameters():
        assert torch.equal(model.module.base_model.get_parameter(name), parameter), name


def test_a_critic_from_a_reward_model_keeps_its_head(tmp_path):
    saved = critic_of(tmp_path)
    saved.module.save_pretrained(tmp_path / "reward")
    loaded = load_value_model(ModelSection(path=str(tmp_path / "reward")), CPU)
    assert not loaded.head_is_new
    assert torch.equal(loaded.head.weight, saved.head.weight)
    inputs = padded_inputs(PAIRS, 32, CPU)
    torch.testing.assert_close(response_values(loaded, inputs), response_values(saved, inputs))


def test_a_random_critic_is_the_same_for_the_same_seed_and_starts_at_zero(tmp_path):
    write_tiny_model(tmp_path / "lm")
    settings = ModelSection(path=str(tmp_path / "lm"), random_weights=True)
    first, second, third = (load_value_model(settings, CPU, seed) for seed in (0, 0, 1))
    states = [dict(model.module.named_parameters()) for model in (first, second, third)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])
    assert not any(state["score.weight"].any() for state in states)


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        load_value_model(ModelSection(path=str(path)), CPU)
    return caught.value


def test_what_cannot_be_a_critic_is_refused_under_its_key(tmp_path):
    labels = {"one": {"num_labels": 1}, "many": {"num_labels": 3}}
    configs = {name: LlamaConfig(**FAMILIES["llama"].to_dict() | more) for name, more in labels.items()}
    many = AutoModelForSequenceClassification.from_config(configs["many"])
    many.save_pretrained(tmp_path / "many")
    assert "3 labels" in refusal(tmp_path / "many").rule
    biased = AutoModelForTokenClassification.from_config(configs["one"])
    biased.save_pretrained(tmp_path / "biased")
    assert "score.bias" in refusal(tmp_path / "biased").rule
    MambaConfig(hidden_size=16, num_hidden_layers=1).save_pretrained(tmp_path / "mamba")
    assert "no sequence classifier" in refusal(tmp_path / "mamba").rule
    configs["one"].save_pretrained(tmp_path / "empty")
    errors = [refusal(tmp_path / name) for name in ("many", "biased", "mamba", "empty", "nowhere")]
    assert {error.key for error in errors} == {"critic.path"}


def test_a_checkpoint_with_weights_missing_is_refused_and_not_filled_with_noise(tmp_path):
    module = tiny_model().module
    state = {name: tensor for name, tensor in module.state_dict().items() if ".layers.1.mlp." not in name}
    module.save_pretrained(tmp_path / "cut", state_dict=state)
    assert "layers.1.mlp" in refusal(tmp_path / "cut").rule


def test_the_head_of_one_row_is_counted_as_one_row(tmp_path):
    model = critic_of(tmp_path)
    assert model.shape.vocab_size == 1
    assert model.shape.body_parameters == tiny_model().shape.body_parameters
