"""KL estimates: values, bounds, and a gradient that is finite whatever the difference."""

import math
from typing import get_args

import numpy as np
import pytest
import torch
from algorithm_cases import tokens

from paceline.algorithms.kl import KlEstimator, kl_estimate, kl_penalties

ESTIMATORS: tuple[KlEstimator, ...] = get_args(KlEstimator)
CAP = 10.0


def at_difference(estimator: KlEstimator, d: float, cap: float = CAP) -> tuple[float, float]:
    """Value and gradient with respect to the policy's log-prob, in float32, at reference - policy = d."""
    logprob_T = torch.zeros(1, requires_grad=True)
    value_T = kl_estimate(estimator, logprob_T, torch.tensor([d]), cap)
    value_T.sum().backward()
    assert logprob_T.grad is not None
    return value_T.item(), logprob_T.grad.item()


@pytest.mark.parametrize(("d", "expected"), [(0.5, 0.14872), (-0.5, 0.10653), (0.0, 0.0), (100.0, 10.0)])
def test_the_low_variance_estimate_is_right_and_capped(d: float, expected: float) -> None:
    assert at_difference("k3", d)[0] == pytest.approx(expected, abs=5e-6)


@pytest.mark.parametrize("d", [0.5, -0.5, 1.5, -3.0])
def test_below_the_cap_gradients_are_those_of_the_formulas(d: float) -> None:
    assert at_difference("k1", d) == pytest.approx((-d, 1.0), rel=1e-5)
    assert at_difference("k2", d) == pytest.approx((d * d / 2, -d), rel=1e-5)
    assert at_difference("k3", d) == pytest.approx((math.exp(d) - 1 - d, 1 - math.exp(d)), rel=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("cap", [0.1, 10.0, 1000.0])
@pytest.mark.parametrize(
    "d", [50.0, -50.0, 88.0, 89.0, 100.0, -100.0, 1e4, -1e4, 3e38, -3e38, math.inf, -math.inf]
)
def test_no_difference_gives_a_gradient_that_is_not_finite(
    estimator: KlEstimator, cap: float, d: float
) -> None:
    value, gradient = at_difference(estimator, d, cap)
    assert math.isfinite(gradient) and abs(value) <= cap * (1 + 1e-6)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("cap", [0.1, 1.0, 10.0, 500.0])
@pytest.mark.parametrize("d", [1e3, -1e3])
def test_a_large_difference_reaches_the_cap_exactly(estimator: KlEstimator, cap: float, d: float) -> None:
    value, gradient = at_difference(estimator, d, cap)
    assert value == pytest.approx(cap) and gradient == 0.0


@pytest.mark.parametrize("cap", [0.1, 10.0, 200.0])
def test_the_bound_before_the_exponential_changes_nothing_below_the_cap(cap: float) -> None:
    d_T = torch.linspace(-cap - 3, min(cap + 3, 20.0), 2001, dtype=torch.float64)
    expected_T = (d_T.exp() - 1 - d_T).clamp(max=cap)
    torch.testing.assert_close(
        kl_estimate("k3", torch.zeros_like(d_T), d_T, cap), expected_T, atol=1e-12, rtol=1e-9
    )


def test_small_differences_do_not_round_to_a_negative_estimate() -> None:
    d_T = torch.logspace(-8, -2, 200)
    value_T = kl_estimate("k3", torch.zeros(200), d_T, CAP)
    assert (value_T >= 0).all()
    torch.testing.assert_close(value_T[-1].item(), math.expm1(0.01) - 0.01, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_log_prob_that_is_no_number_is_not_hidden(estimator: KlEstimator) -> None:
    assert math.isnan(at_difference(estimator, math.nan)[0])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_no_gradient_reaches_the_reference(estimator: KlEstimator) -> None:
    reference_T = tokens(-1.0, grad=True)
    kl_estimate(estimator, tokens(-2.0, grad=True), reference_T, CAP).sum().backward()
    assert reference_T.grad is None


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_over_sampled_tokens_is_the_kl(estimator: KlEstimator) -> None:
    policy_V, reference_V = tokens(0.5, 0.3, 0.2), tokens(0.2, 0.3, 0.5)
    expected = (policy_V * (policy_V / reference_V).log()).sum()
    mean = (policy_V * kl_estimate(estimator, policy_V.log(), reference_V.log(), CAP)).sum()
    torch.testing.assert_close(mean, expected)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="k4"):
        kl_estimate("k4", tokens(0.0), tokens(0.0), CAP)  # type: ignore[arg-type]


def test_the_reward_loses_the_kl_of_every_loss_token() -> None:
    logprobs = np.array([-1.0, -2.0, -3.0, -4.0], dtype=np.float32)
    reference = np.array([-1.5, -2.0, -99.0, -3.0], dtype=np.float32)
    mask = np.array([1, 1, 0, 1], dtype=np.float32)
    penalties = kl_penalties(logprobs, reference, mask, "k1", 0.1, CAP)
    np.testing.assert_allclose(penalties, [0.05, 0.0, 0.0, -0.1], rtol=1e-6)
    assert not kl_penalties(logprobs, reference, np.zeros(4, np.float32), "k3", 0.1, CAP).any()


def test_what_stands_at_a_masked_token_does_not_reach_the_reward() -> None:
    logprobs = np.array([-1.0, -math.inf], dtype=np.float32)
    reference = np.array([-1.0, -math.inf], dtype=np.float32)
    assert not kl_penalties(logprobs, reference, np.array([1, 0], np.float32), "k3", 1.0, CAP).any()
