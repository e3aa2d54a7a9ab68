"""The critic's clipped loss by hand-computed numbers; masks and denominators as for every other loss."""

import math

import pytest
import torch
from algorithm_cases import tokens

from paceline.algorithms.losses.value import ValueInputs, value_loss
from paceline.algorithms.value_objective import value_objective

CLIP = 0.2


def inputs(value_T, old_T, return_T, mask_T=None, weight_T=None):
    ones_T = torch.ones_like(return_T)
    return ValueInputs(
        value_T,
        old_T,
        return_T,
        ones_T if weight_T is None else weight_T,
        ones_T if mask_T is None else mask_T,
    )


def test_the_larger_error_counts_and_a_value_past_the_clip_is_held():
    # (value, old, return): inside the clip; past it towards the return; past it away from the return; clip on a side
    # where the clipped error is the smaller; exactly at the edge
    value_T = tokens(0.1, 0.5, -0.5, 0.9, 0.2, grad=True)
    terms = value_loss(inputs(value_T, torch.zeros(5).double(), tokens(1.0, 1.0, 1.0, 0.0, 1.0)), CLIP)
    # 0.5 * 0.9^2; 0.5 * (0.2 - 1)^2 > 0.5 * 0.5^2; 0.5 * 1.5^2 > 0.5 * 1.2^2; 0.5 * 0.9^2 > 0.5 * 0.2^2; 0.5 * 0.8^2
    torch.testing.assert_close(terms.loss_T.detach(), tokens(0.405, 0.32, 1.125, 0.405, 0.32))
    assert terms.clipped_T.tolist() == [False, True, False, False, False]
    terms.loss_T.sum().backward()
    # V - R, and 0 where the clip holds
    torch.testing.assert_close(value_T.grad, tokens(-0.9, 0.0, -1.5, 0.9, -0.8))


def test_without_a_clip_it_is_half_the_squared_error():
    value_T = tokens(0.5, 3.0, grad=True)
    terms = value_loss(inputs(value_T, tokens(0.0, 0.0), tokens(1.0, 1.0)), 0.0)
    torch.testing.assert_close(terms.loss_T.detach(), tokens(0.125, 2.0))
    assert not terms.clipped_T.any()
    terms.loss_T.sum().backward()
    torch.testing.assert_close(value_T.grad, tokens(-0.5, 2.0))


@pytest.mark.parametrize("clip", [0.0, CLIP])
def test_what_stands_at_a_masked_token_has_no_influence(clip):
    nan = math.nan
    value_T = tokens(0.5, nan, 7.0, grad=True)
    masked = inputs(value_T, tokens(0.0, nan, 0.0), tokens(1.0, nan, nan), tokens(1.0, 0.0, 0.0))
    found = value_objective(masked, clip)
    alone = value_objective(inputs(tokens(0.5), tokens(0.0), tokens(1.0)), clip)
    assert found.loss.item() == pytest.approx(alone.loss.item())
    assert found.metrics == alone.metrics
    found.loss.backward()
    assert value_T.grad[1:].tolist() == [0.0, 0.0]


def test_micro_batches_add_up_to_the_mean_over_all_tokens():
    generator = torch.Generator().manual_seed(0)
    value_T, old_T, return_T = (torch.randn(7, generator=generator, dtype=torch.float64) for _ in range(3))
    weight_T = torch.full((7,), 1 / 7, dtype=torch.float64)
    whole = value_objective(inputs(value_T, old_T, return_T, weight_T=weight_T), CLIP)
    cuts = (slice(0, 1), slice(1, 5), slice(5, 7))
    parts = [
        value_objective(inputs(value_T[c], old_T[c], return_T[c], weight_T=weight_T[c]), CLIP) for c in cuts
    ]
    assert sum(float(part.loss) for part in parts) == pytest.approx(float(whole.loss))
    assert float(whole.loss) == pytest.approx(
        float(value_loss(inputs(value_T, old_T, return_T), CLIP).loss_T.mean())
    )


def test_no_gradient_reaches_old_values_or_returns():
    old_T, return_T = tokens(0.0, 0.4, grad=True), tokens(1.0, 2.0, grad=True)
    loss = value_objective(inputs(tokens(0.5, 0.5, grad=True), old_T, return_T), CLIP).loss
    loss.backward()
    assert old_T.grad is None and return_T.grad is None


def test_a_micro_batch_without_a_loss_token_has_loss_zero_and_no_clip_fraction():
    value_T = tokens(0.5, grad=True)
    found = value_objective(inputs(value_T, tokens(0.0), tokens(1.0), tokens(0.0), tokens(0.0)), CLIP)
    found.loss.backward()
    assert found.metrics == {"critic/loss": (0.0, 1.0)} and value_T.grad.tolist() == [0.0]


def test_a_value_that_is_no_number_is_not_hidden():
    loss = value_objective(inputs(tokens(math.nan), tokens(0.0), tokens(1.0)), CLIP).loss
    assert math.isnan(loss.item())
