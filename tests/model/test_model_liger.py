"""Liger's kernels: in the module where they can run, and the same numbers with them."""

import pytest
import torch
from tiny_models import tiny_model
from transformers import AutoModelForCausalLM

from paceline.batching.prefixes import PackItem, build_pack
from paceline.config import ConfigError
from paceline.config.schema import LoraSection
from paceline.model.families import check_family
from paceline.model.fused import fuse_for_device
from paceline.model.inputs import packed_inputs, score
from paceline.model.liger import apply_liger
from paceline.model.loading import CausalModel, wrap_model
from paceline.model.logprob_head import HeadSettings
from paceline.model.lora import add_adapters


def test_on_a_cpu_the_module_stays_as_it_is_and_asking_for_the_kernels_is_refused():
    model = tiny_model()
    use = apply_liger(model, "auto")
    assert not use.is_used and "CUDA" in use.reason
    assert not apply_liger(model, "off").is_used
    with pytest.raises(ConfigError, match="CUDA") as refused:
        apply_liger(model, "on")
    assert refused.value.key == "sft.liger"


def cuda_model(family: str, dtype: torch.dtype) -> CausalModel:
    config = tiny_model(family).module.config
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=dtype).to("cuda")
    return wrap_model(module, torch.device("cuda"), check_family(config, type(module)))


def logprobs_and_gradients(model: CausalModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    items = [PackItem(tuple(range(5, 25)), ((30, 31, 32),)), PackItem(tuple(range(40, 52)), ((60, 61),))]
    pack = build_pack(items, share_prefixes=False)
    logprobs, _ = score(model, packed_inputs(pack, model.device), HeadSettings(1.0, model.logit_softcap, 64))
    logprobs.sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.module.named_parameters() if p.grad is not None}
    return logprobs.detach(), gradients


@pytest.mark.gpu
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma2"])
def test_the_kernels_compute_what_the_module_computes(family: str, lora: bool):
    pytest.importorskip("liger_kernel")
    models = [cuda_model(family, torch.float32) for _ in range(2)]
    if lora:
        models = [add_adapters(model, LoraSection(rank=4), "base", seed=0) for model in models]
    expected = logprobs_and_gradients(models[0])
    assert apply_liger(models[1], "on").is_used
    found = logprobs_and_gradients(models[1])
    torch.testing.assert_close(found[0], expected[0], rtol=1e-3, atol=1e-3)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-2, atol=1e-2, msg=name)


@pytest.mark.gpu
def test_fused_layers_leave_nothing_for_the_kernels_to_do():
    pytest.importorskip("liger_kernel")
    model = cuda_model("llama", torch.bfloat16)
    assert fuse_for_device(model.module, model.device).num_layers
    assert not apply_liger(model, "auto").is_used
    with pytest.raises(ConfigError, match="fused layers"):
        apply_liger(model, "on")
