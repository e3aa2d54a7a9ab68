"""The native engine on a CUDA device: sampled log-probs are the trainer's."""

import pytest
import torch
from tiny_models import FAMILIES
from transformers import AutoModelForCausalLM

from paceline.batching.prefixes import PackItem, build_pack
from paceline.model.families import check_family
from paceline.model.inputs import packed_inputs, score
from paceline.model.loading import wrap_model
from paceline.model.logprob_head import HeadSettings
from paceline.rollout import NativeEngine, RolloutRequest, SamplingParams
from paceline.rollout.native.engine import EngineLimits
from paceline.telemetry.ledger import Ledger
from paceline.types import Prompt

pytestmark = pytest.mark.gpu


class Words:
    """Stands for a tokenizer."""

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_are_the_trainers_on_cuda(family, dtype, tolerance):
    device = torch.device("cuda")
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=dtype).to(device)
    model = wrap_model(module, device, check_family(FAMILIES[family], type(module)))
    native = NativeEngine(model, Words(), EngineLimits(6, 4096), Ledger())
    header = tuple(range(10, 32))
    asked = [
        RolloutRequest(Prompt(f"p{i}", (*header, 40 + i), ""), tuple(range(i * 9, i * 9 + 4)), 8)
        for i in range(3)
    ]
    groups = native.generate(asked, SamplingParams(0.9, frozenset({2})))
    items = [
        PackItem(r.prompt.token_ids, tuple(s.token_ids for s in g))
        for r, g in zip(asked, groups, strict=True)
    ]
    sampled = torch.tensor([lp for g in groups for s in g for lp in s.logprobs], device=device)
    for share in (True, False):
        with torch.no_grad():
            inputs = packed_inputs(build_pack(items, share_prefixes=share), device)
            scored, _ = score(model, inputs, HeadSettings(0.9, model.logit_softcap, 16))
        assert (scored - sampled).abs().mean() <= tolerance
