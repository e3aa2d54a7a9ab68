"""GAE, whitening and explained variance against numbers worked out by hand and a slow reference."""

import math

import numpy as np
import pytest

from paceline.algorithms.gae import (
    estimate_advantages,
    explained_variance,
    masked_mean,
    token_rewards,
    whiten,
)

FLOOR = 1e-3


def array(*numbers):
    return np.array(numbers, dtype=np.float64)


def one(rewards, values, mask, gamma, gae_lambda):
    (credit,) = estimate_advantages([rewards], [values], [mask], gamma, gae_lambda)
    return credit


def by_recursion(rewards, values, mask, gamma, gae_lambda):
    """The definition, one action after the other from the last."""
    advantages, returns = np.zeros(len(mask)), np.zeros(len(mask))
    carry, next_value = 0.0, 0.0
    for index in reversed(range(len(mask))):
        if mask[index]:
            carry = rewards[index] + gamma * next_value - values[index] + gamma * gae_lambda * carry
            next_value = values[index]
            advantages[index], returns[index] = carry, carry + values[index]
    return advantages, returns


def test_three_tokens_worked_out_by_hand():
    # deltas, last first: 1 - 0.2 = 0.8; 0.9 * 0.2 - 0.4 = -0.22; 0.9 * 0.4 - 0.5 = -0.14; gamma * lambda = 0.45
    credit = one(array(0, 0, 1), array(0.5, 0.4, 0.2), np.ones(3), 0.9, 0.5)
    np.testing.assert_allclose(credit.advantages_L, [-0.14 + 0.45 * 0.14, 0.14, 0.8], rtol=1e-6)
    np.testing.assert_allclose(credit.returns_L, [0.423, 0.54, 1.0], rtol=1e-6)


def test_lambda_one_is_reward_to_go_less_the_value_and_lambda_zero_the_one_step_error():
    rewards, values = array(-0.1, -0.2, 1.0), array(0.3, 0.6, 0.1)
    monte_carlo = one(rewards, values, np.ones(3), 1.0, 1.0)
    np.testing.assert_allclose(monte_carlo.returns_L, [0.7, 0.8, 1.0], rtol=1e-6)
    np.testing.assert_allclose(monte_carlo.advantages_L, [0.4, 0.2, 0.9], rtol=1e-6)
    one_step = one(rewards, values, np.ones(3), 1.0, 0.0)
    np.testing.assert_allclose(one_step.advantages_L, [0.2, -0.7, 0.9], rtol=1e-6)


def test_a_perfect_critic_leaves_no_advantage():
    credit = one(array(0, 0, 0, 1), array(0.729, 0.81, 0.9, 1.0), np.ones(4), 0.9, 0.95)
    np.testing.assert_allclose(credit.advantages_L, 0.0, atol=1e-7)
    np.testing.assert_allclose(credit.returns_L, [0.729, 0.81, 0.9, 1.0], rtol=1e-6)


def test_tokens_of_a_tool_are_stepped_over_whatever_their_values():
    mask = array(1, 0, 0, 1, 1, 0)
    rewards = token_rewards(2.0, mask)
    values = array(0.5, 99.0, math.nan, 0.4, 0.2, math.inf)
    with_tool = one(rewards, values, mask, 0.9, 0.5)
    without = one(array(0, 0, 2), array(0.5, 0.4, 0.2), np.ones(3), 0.9, 0.5)
    np.testing.assert_array_equal(with_tool.advantages_L[mask > 0], without.advantages_L)
    np.testing.assert_array_equal(with_tool.returns_L[mask > 0], without.returns_L)
    assert not with_tool.advantages_L[mask == 0].any() and not with_tool.returns_L[mask == 0].any()


def test_the_score_is_paid_at_the_last_action_and_kl_where_it_arises():
    mask = array(1, 0, 1, 0)
    np.testing.assert_array_equal(token_rewards(1.0, mask), [0, 0, 1, 0])
    np.testing.assert_allclose(token_rewards(1.0, mask, array(0.1, 7.0, 0.3, 7.0)), [-0.1, 0, 0.7, 0])
    np.testing.assert_array_equal(token_rewards(1.0, np.zeros(3), array(1, 1, 1)), np.zeros(3))


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.97, 0.9), (1.0, 1.0), (0.9, 0.0)])
def test_samples_of_every_length_together_equal_the_recursion_one_by_one(gamma, gae_lambda):
    generator = np.random.default_rng(0)
    masks = [generator.integers(0, 2, length).astype(np.float32) for length in (1, 9, 0, 4, 30)]
    masks.append(np.zeros(5, np.float32))
    rewards = [generator.normal(size=len(mask)) for mask in masks]
    values = [generator.normal(size=len(mask)) for mask in masks]
    found = estimate_advantages(rewards, values, masks, gamma, gae_lambda)
    for credit, *arrays in zip(found, rewards, values, masks, strict=True):
        advantages, returns = by_recursion(*arrays, gamma, gae_lambda)
        np.testing.assert_allclose(credit.advantages_L, advantages, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(credit.returns_L, returns, rtol=1e-5, atol=1e-6)


def test_no_samples_give_no_credit():
    assert estimate_advantages([], [], [], 1.0, 0.95) == []


def test_a_value_that_is_no_number_at_a_loss_token_is_an_error_and_not_an_advantage():
    with pytest.raises(ValueError, match="sample 1: a value at a loss token is not finite"):
        estimate_advantages([np.zeros(2)] * 2, [np.zeros(2), array(0, math.nan)], [np.ones(2)] * 2, 1.0, 0.95)
    with pytest.raises(ValueError, match="sample 0: 1 values do not cover"):
        estimate_advantages([np.zeros(2)], [np.zeros(1)], [np.ones(2)], 1.0, 0.95)


def test_whitening_is_one_map_for_the_batch_however_it_is_sharded():
    masks = [np.ones(2), np.ones(3), np.ones(0)]
    shards = whiten([array(1, 2), array(3, 4, 5), array()], masks, FLOOR)
    expected = [-1.4142136, -0.7071068, 0.0, 0.7071068, 1.4142136]
    np.testing.assert_allclose(np.concatenate(shards), expected, rtol=1e-6, atol=1e-7)
    assert len(shards[2]) == 0
    (whole,) = whiten([array(1, 2, 3, 4, 5)], [np.ones(5)], FLOOR)
    np.testing.assert_array_equal(np.concatenate(shards), whole)


def test_masked_tokens_are_in_no_statistic_and_stay_zero():
    found = whiten([array(1, 1e9, 2), array(3, 4, 5, math.nan)], [array(1, 0, 1), array(1, 1, 1, 0)], FLOOR)
    np.testing.assert_allclose(found[0], [-1.4142136, 0.0, -0.7071068], rtol=1e-6)
    np.testing.assert_allclose(found[1], [0.0, 0.7071068, 1.4142136, 0.0], rtol=1e-6, atol=1e-7)


def test_whitening_nothing_or_equal_numbers_gives_zeros():
    assert [len(x) for x in whiten([], [], FLOOR)] == []
    np.testing.assert_array_equal(whiten([array(7, 8)], [np.zeros(2)], FLOOR)[0], np.zeros(2))
    np.testing.assert_array_equal(whiten([array(0.1, 0.1, 0.1)], [np.ones(3)], FLOOR)[0], np.zeros(3))


def test_explained_variance_of_a_perfect_a_constant_and_a_wrong_critic():
    returns, mask = [array(1, 2), array(3, 99)], [np.ones(2), array(1, 0)]
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance([array(5, 5), array(5, 5)], returns, mask) == pytest.approx(0.0)
    assert explained_variance([array(3, 2), array(1, 0)], returns, mask) == pytest.approx(1 - 4)
    # a constant offset is no variance: it is what the mean of values and returns shows
    assert explained_variance([array(2, 3), array(4, 0)], returns, mask) == pytest.approx(1.0)


def test_explained_variance_of_nothing_to_explain_is_unknown_not_zero():
    assert explained_variance([array(1, 2)], [array(3, 3)], [np.ones(2)]) is None
    assert explained_variance([array(1)], [array(3)], [np.ones(1)]) is None
    assert explained_variance([], [], []) is None
    assert masked_mean([array(1, 5)], [array(0, 1)]) == 5.0
    assert masked_mean([array(1)], [np.zeros(1)]) is None
