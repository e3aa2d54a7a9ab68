"""The same equalities on a CUDA device: packed, shared and padded rows against one-by-one evaluation."""

import pytest
import torch
from tiny_models import FAMILIES
from transformers import AutoModelForCausalLM

from paceline.batching.prefixes import PackItem, build_pack
from paceline.model.attention import ATTENTION_NAME
from paceline.model.families import check_family
from paceline.model.inputs import packed_inputs, padded_inputs, score
from paceline.model.loading import wrap_model
from paceline.model.logprob_head import HeadSettings

pytestmark = pytest.mark.gpu

HEADER = tuple(range(10, 30))
ITEMS = [
    PackItem((*HEADER, 31, 32), ((40, 41, 42), (43,), (44, 45, 46, 47, 48))),
    PackItem((*HEADER, 33), ((50, 51), (52, 53, 54))),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_equals_one_by_one_evaluation_on_cuda(family, dtype, tolerance):
    device = torch.device("cuda")
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=dtype).to(device)
    model = wrap_model(module, device, check_family(FAMILIES[family], type(module)))
    settings = HeadSettings(1.0, model.logit_softcap, 16)
    module.set_attn_implementation("eager")
    expected = []
    with torch.no_grad():
        for item in ITEMS:
            for response in item.responses:
                ids = torch.tensor([[*item.prompt, *response]], device=device)
                log_p = (
                    module(input_ids=ids, use_cache=False)
                    .logits[0, len(item.prompt) - 1 : -1]
                    .float()
                    .log_softmax(-1)
                )
                expected.append(log_p.gather(-1, ids[0, len(item.prompt) :, None])[:, 0])
    module.set_attn_implementation(ATTENTION_NAME)
    pairs = [(item.prompt, response) for item in ITEMS for response in item.responses]
    gradients = []
    for inputs in (
        padded_inputs(pairs, 40, device),
        packed_inputs(build_pack(ITEMS, share_prefixes=False), device),
        packed_inputs(build_pack(ITEMS, share_prefixes=True), device),
    ):
        found, _ = score(model, inputs, settings)
        difference = (found - torch.cat(expected)).abs()
        assert difference.mean() <= tolerance
        module.zero_grad()
        found.sum().backward()
        gradients.append(
            torch.cat([p.grad.flatten().float() for p in module.parameters() if p.grad is not None])
        )
    for gradient in gradients[1:]:
        distance = float((gradient - gradients[0]).norm() / gradients[0].norm())
        assert distance <= (1e-5 if dtype == torch.float32 else 0.1)
