"""Exact mode: a token's log-prob is the same bits whatever is computed beside it."""

import pytest
import torch
from tiny_models import FAMILIES, tiny_model

from paceline.batching.prefixes import PackItem, build_pack
from paceline.model.exact import make_exact
from paceline.model.exact_attention import attend_exact
from paceline.model.exact_products import product_in_tiles
from paceline.model.inputs import packed_inputs, padded_inputs, score
from paceline.model.logprob_head import HeadSettings


@pytest.mark.parametrize(("inner", "outer"), [(48, 64), (64, 97), (576, 1536)])
def test_a_row_of_a_product_is_the_same_bits_alone_and_among_others(inner, outer):
    torch.manual_seed(0)
    x, weight = torch.randn(70, inner), torch.randn(outer, inner)
    together = product_in_tiles(x, weight, None)
    torch.testing.assert_close(together, x @ weight.T, rtol=1e-4, atol=1e-4)
    for start, end in ((0, 1), (33, 34), (5, 40), (69, 70)):
        assert torch.equal(product_in_tiles(x[start:end], weight, None), together[start:end])


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, None), (None, 5.0)])
def test_a_query_is_the_same_bits_alone_and_among_others(window, softcap):
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 90, 16), torch.randn(1, 2, 90, 16), torch.randn(1, 2, 90, 16)
    settings = {"scale": 0.3, "window": window, "softcap": softcap}
    together = attend_exact(query, key, value, torch.arange(90)[None], **settings)
    for at in (0, 1, 31, 32, 50, 89):
        alone = attend_exact(
            query[:, :, at : at + 1],
            key[:, :, : at + 1],
            value[:, :, : at + 1],
            torch.tensor([[at]]),
            **settings,
        )
        assert torch.equal(alone[:, :, 0], together[:, :, at])


@pytest.mark.parametrize("family", FAMILIES)
def test_scored_logprobs_are_the_same_bits_in_every_layout(family):
    model = tiny_model(family)
    prompts = [tuple(range(10, 40)), (*range(10, 39), 60)]
    responses = [((5, 6, 2), (7,) * 40), ((8, 9), (3, 4, 5))]
    items = [PackItem(p, r) for p, r in zip(prompts, responses, strict=True)]
    inexact = _scored(model, items, share=False, head=HeadSettings(0.9, model.logit_softcap, 16))
    make_exact(model)
    head = HeadSettings(0.9, model.logit_softcap, 7, exact=True)
    expected = _scored(model, items, share=False, head=head)
    torch.testing.assert_close(expected, inexact, rtol=0, atol=1e-4)
    assert torch.equal(_scored(model, items, share=True, head=head), expected)
    pairs = [(item.prompt, response) for item in items for response in item.responses]
    padded, _ = score(model, padded_inputs(pairs, 80, model.device), head)
    assert torch.equal(padded, expected)


def _scored(model, items, share, head):
    with torch.no_grad():
        logprobs, _ = score(model, packed_inputs(build_pack(items, share_prefixes=share), model.device), head)
    return logprobs
