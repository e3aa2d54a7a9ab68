"""LoRA: adapters change nothing until trained, vanish without a trace, and merge into what they compute."""

import sys

import pytest
import torch
from peft import PeftModel
from tiny_models import FAMILIES, tiny_model
from tiny_runs import write_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.batching.prefixes import PackItem, build_pack
from paceline.checkpoint import export_hf
from paceline.config import ConfigError
from paceline.config.schema import LoraSection
from paceline.model.cpu_linear import use_weight_first_products
from paceline.model.inputs import packed_inputs, score
from paceline.model.logprob_head import HeadSettings
from paceline.model.lora import AdaptedModel, add_adapters, save_adapter

LORA = LoraSection(rank=4)
ITEMS = [PackItem(tuple(range(5, 25)), ((30, 31, 32), (40, 41))), PackItem(tuple(range(5, 22)), ((50, 51),))]


def adapted(family: str = "llama", settings: LoraSection = LORA, **model) -> AdaptedModel:
    return add_adapters(tiny_model(family, **model), settings, "base", seed=7)


def trained(model: AdaptedModel) -> AdaptedModel:
    """As if training had moved both matrices of every adapter."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def logprobs(model) -> torch.Tensor:
    settings = HeadSettings(1.0, model.logit_softcap, 64)
    pack = build_pack(ITEMS, share_prefixes=True)
    return score(model, packed_inputs(pack, model.device), settings)[0]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_fresh_adapters_change_no_bit_and_are_all_that_can_be_trained(family):
    model = adapted(family)
    assert torch.equal(logprobs(model), logprobs(tiny_model(family)))
    trainable = {name for name, p in model.module.named_parameters() if p.requires_grad}
    assert trainable and all(".lora_" in name for name in trainable)
    # q k v o gate up down, A and B, in both layers
    assert len(trainable) == 7 * 2 * 2


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_without_its_adapters_the_model_is_the_separately_loaded_reference(family):
    model = trained(adapted(family))
    separate = logprobs(tiny_model(family))
    with_adapters = logprobs(model)
    assert not torch.allclose(with_adapters, separate, atol=1e-2)
    assert torch.equal(logprobs(model.without_adapters()), separate)
    assert torch.equal(logprobs(model), with_adapters)  # and they are back on
    assert all(p.requires_grad for name, p in model.module.named_parameters() if ".lora_" in name)


def test_adapters_come_back_when_scoring_the_reference_fails(monkeypatch):
    model = trained(adapted())
    with torch.no_grad():
        before = logprobs(model)
        with pytest.raises(IndexError), monkeypatch.context():
            model.without_adapters().hidden(torch.tensor([[10**6]]), torch.tensor([[0]]), None)
        assert torch.equal(logprobs(model), before)


def test_the_reference_cannot_be_trained():
    with pytest.raises(RuntimeError, match="never trained"):
        logprobs(adapted().without_adapters())


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@torch.no_grad()
def test_merged_weights_load_without_peft_and_compute_the_same(family, tmp_path):
    write_tiny_model(tmp_path / "base", family)
    model = trained(adapted(family))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "base")
    export_hf(model.module, tokenizer, tmp_path / "merged", model.merged_state_dict())
    ids = torch.tensor([[*range(5, 25), 30, 31, 32]])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    model.module.set_attn_implementation("eager")
    torch.testing.assert_close(merged(ids).logits, model.module(ids).logits, atol=2e-4, rtol=1e-4)
    assert {name for name, _ in merged.named_parameters()} == {
        name for name, _ in tiny_model(family).module.named_parameters()
    }


@torch.no_grad()
def test_the_adapter_alone_loads_through_peft_onto_the_base_model(tmp_path):
    model = trained(adapted())
    save_adapter(model, tmp_path)
    base = tiny_model().module
    base.set_attn_implementation("eager")
    ids = torch.tensor([[*range(5, 25)]])
    before = base(ids).logits.clone()
    loaded = PeftModel.from_pretrained(base, tmp_path)
    model.module.set_attn_implementation("eager")
    torch.testing.assert_close(loaded(ids).logits, model.module(ids).logits, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(loaded(ids).logits, before, atol=1e-2)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_an_adapted_layer_computes_what_pefts_own_does_forward_and_backward(family):
    model, plain = (trained(adapted(family)) for _ in range(2))
    for _, layer in plain.layers:
        del layer.forward  # PEFT's own is below
    torch.testing.assert_close(logprobs(model), logprobs(plain), atol=1e-5, rtol=1e-5)
    found, expected = gradients(model), gradients(plain)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-4)


def gradients(model: AdaptedModel) -> dict[str, torch.Tensor]:
    model.module.zero_grad()
    logprobs(model).sum().backward()
    return {name: p.grad.clone() for name, p in model.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gradient_checkpointing_works_though_the_embeddings_are_frozen(family):
    model = trained(adapted(family))
    plain = gradients(model)
    model.module.train()
    model.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpointed = gradients(model)
    assert plain.keys() == checkpointed.keys() and all(".lora_" in name for name in plain)
    for name in plain:
        torch.testing.assert_close(checkpointed[name], plain[name], atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_the_weight_first_products_of_a_cpu_reach_the_layers_below_the_adapters():
    plain, fast = (trained(adapted(dtype=torch.bfloat16)) for _ in range(2))
    assert use_weight_first_products(fast.module) >= 14
    torch.testing.assert_close(logprobs(fast), logprobs(plain), atol=0.1, rtol=0.02)
    before = logprobs(fast)
    for _, layer in fast.layers:
        layer.get_base_layer().weight.mul_(1.5)  # the trick must read the layer's weight, not a copy of it
    assert not torch.allclose(logprobs(fast), before, atol=0.1)


def test_adapters_start_from_the_seed_whatever_the_dtype():
    def first(model):
        return {n: p.detach().float() for n, p in model.module.named_parameters() if ".lora_A." in n}

    torch.manual_seed(11)
    one, half = first(adapted()), first(adapted(dtype=torch.bfloat16))
    for name in one:
        assert torch.equal(one[name].bfloat16().float(), half[name])
    other = first(add_adapters(tiny_model(), LORA, "base", seed=8))
    assert all(not torch.equal(one[name], other[name]) for name in one)
    values = list(one.values())
    assert not torch.equal(values[0], values[4])


def test_only_the_asked_layers_are_adapted_and_a_name_that_is_not_there_is_refused():
    model = adapted(settings=LoraSection(rank=2, alpha=2.0, target_modules=("q_proj", "v_proj")))
    assert {name.rpartition(".")[2] for name, _ in model.layers} == {"q_proj", "v_proj"}
    assert {layer.scaling["default"] for _, layer in model.layers} == {1.0}
    with pytest.raises(ConfigError, match="q_proj") as refused:
        adapted(settings=LoraSection(rank=2, target_modules=("query_proj",)))
    assert refused.value.key == "lora.target_modules"


def test_without_peft_the_refusal_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"paceline\[lora\]"):
        adapted()
