"""`rollout.exact`: the engine's log-probs are the trainer's, bit for bit, whatever runs beside a sample."""

import pytest
import torch
from test_paged_engine import bound_of, logprobs, paged
from test_rollout_native import EOS, SAMPLED, requests, tokens
from tiny_models import FAMILIES

from paceline.batching.prefixes import PackItem, build_pack
from paceline.model.exact import make_exact
from paceline.model.inputs import packed_inputs, score
from paceline.model.logprob_head import HeadSettings
from paceline.rollout import SamplingParams


def exact(family="llama", **limits):
    native = paged(family, **limits)
    make_exact(native._model)
    return native


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logprobs_are_the_trainers_bit_for_bit(family, share):
    native = exact(family)
    asked = requests(limit=40)
    groups = native.generate(asked, SAMPLED)
    items = [
        PackItem(r.prompt.token_ids, tuple(s.token_ids for s in g))
        for r, g in zip(asked, groups, strict=True)
    ]
    model = native._model
    pack = build_pack(items, share_prefixes=share)
    with torch.no_grad():
        head = HeadSettings(SAMPLED.temperature, model.logit_softcap, 16, exact=True)
        scored, _ = score(model, packed_inputs(pack, model.device), head)
    assert torch.equal(scored, logprobs(groups))


@pytest.mark.parametrize("limits", [{"max_running": 1}, {"max_running": 3, "budget": 7}, {"page_tokens": 16}])
def test_greedy_output_and_its_logprobs_do_not_depend_on_what_else_runs(limits):
    greedy = SamplingParams(0.0, frozenset({EOS}))
    together = exact().generate(requests(limit=20), greedy)
    found = exact(**limits).generate(requests(limit=20), greedy)
    assert tokens(found) == tokens(together)
    assert torch.equal(logprobs(found), logprobs(together))


def test_preempted_samples_are_the_same_bits():
    expected = exact().generate(requests(num_samples=6, limit=12), SAMPLED)
    native = exact()
    native = exact(max_cache_bytes=bound_of(native, 11))
    found = native.generate(requests(num_samples=6, limit=12), SAMPLED)
    assert native.stats.num_preemptions > 0
    assert tokens(found) == tokens(expected)
    assert torch.equal(logprobs(found), logprobs(expected))
