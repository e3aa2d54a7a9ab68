"""Fused layers compute what transformers' layers compute: values, every gradient, whatever is kept for the backward."""

import copy

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

from paceline.batching.prefixes import PackItem, build_pack
from paceline.model.fused import fuse_layers
from paceline.model.fused.layers import FUSED_FAMILIES, KeepPolicy, keep_policies
from paceline.model.fused.reference import ReferenceElementwise
from paceline.model.inputs import packed_inputs, score
from paceline.model.loading import CausalModel
from paceline.model.logprob_head import HeadSettings

HEAD = HeadSettings(temperature=1.0, softcap=None, chunk=16)


def loss_and_gradients(
    model: CausalModel, share_prefixes: bool
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    rng = np.random.default_rng(3)
    items = [
        PackItem(rng.integers(3, 90, 7).tolist(), [rng.integers(3, 90, n).tolist() for n in lengths])
        for lengths in ((4, 9), (5, 1, 6))
    ]
    inputs = packed_inputs(build_pack(items, share_prefixes), model.device)
    model.module.zero_grad(set_to_none=True)
    logprob_R, _ = score(model, inputs, HEAD)
    weights_R = torch.linspace(-1.0, 1.0, len(logprob_R))
    (logprob_R * weights_R).sum().backward()
    return logprob_R.detach(), {
        name: p.grad for name, p in model.module.named_parameters() if p.grad is not None
    }


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("family", FUSED_FAMILIES)
def test_fused_layers_give_the_same_logprobs_and_gradients(family: str, adjacent: bool) -> None:
    plain = tiny_model(family)
    fused = tiny_model(family)
    assert fuse_layers(fused.module, ReferenceElementwise(), adjacent).num_layers == 2
    expected, expected_gradients = loss_and_gradients(plain, share_prefixes=True)
    found, gradients = loss_and_gradients(fused, share_prefixes=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected_gradients[name]) < 1e-5, name


@pytest.mark.parametrize("keep", [KeepPolicy(False, True), KeepPolicy(False, False), KeepPolicy(True, False)])
def test_what_is_kept_does_not_change_a_gradient(keep: KeepPolicy) -> None:
    everything, some = tiny_model("qwen3"), tiny_model("qwen3")
    for model in (everything, some):
        fuse_layers(model.module, ReferenceElementwise())
    for policy in keep_policies(list(some.module.base_model.layers)):
        policy.cheap, policy.gate_up = keep.cheap, keep.gate_up
    _, expected = loss_and_gradients(everything, share_prefixes=False)
    _, gradients = loss_and_gradients(some, share_prefixes=False)
    for name, gradient in gradients.items():
        assert relative_error(gradient, expected[name]) < 1e-6, name


def test_weights_laid_side_by_side_keep_their_values_and_see_updates_in_place() -> None:
    model = tiny_model("qwen3")
    before = copy.deepcopy(model.module.state_dict())
    fuse_layers(model.module, ReferenceElementwise())
    for name, value in model.module.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    first, _ = loss_and_gradients(model, share_prefixes=False)
    with torch.no_grad():
        model.module.base_model.layers[0].self_attn.v_proj.weight.mul_(1.5)
    second, _ = loss_and_gradients(model, share_prefixes=False)
    assert not torch.allclose(first, second)


def test_a_family_of_another_form_stays_as_it_is_and_says_why() -> None:
    outcome = fuse_layers(tiny_model("gemma2").module, ReferenceElementwise())
    assert outcome.num_layers == 0
    assert outcome.reason is not None and "gemma2" in outcome.reason
