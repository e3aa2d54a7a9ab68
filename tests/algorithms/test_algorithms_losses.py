"""The policy losses, token by token."""

import math

import pytest
import torch
from algorithm_cases import settings_of, single_sample, tokens

from paceline.algorithms.losses import LOSSES, LossInputs, LossTerms
from paceline.algorithms.losses.inputs import MAX_LOG_RATIO
from paceline.config.schema import AlgorithmSection

ADVANTAGES = (1.0, 1.0, -1.0, -1.0, -1.0)
RATIOS = (1.5, 0.5, 1.5, 0.5, 5.0)


def of_ratios(settings: AlgorithmSection) -> tuple[LossTerms, torch.Tensor]:
    """Terms and gradient with respect to the log-probs."""
    logprob_T = tokens(*map(math.log, RATIOS), grad=True)
    inputs = single_sample(logprob_T, torch.zeros(5, dtype=torch.float64), tokens(*ADVANTAGES))
    assert settings.loss is not None
    terms = LOSSES[settings.loss](inputs, settings)
    terms.loss_T.sum().backward()
    assert logprob_T.grad is not None
    return terms, logprob_T.grad


def test_clip_and_dual_clip_bound_the_loss_and_cut_the_gradient() -> None:
    terms, gradient_T = of_ratios(settings_of(dual_clip=3.0))
    torch.testing.assert_close(terms.loss_T.detach(), tokens(-1.2, -0.5, 1.5, 0.8, 3.0))
    torch.testing.assert_close(gradient_T, tokens(0.0, -0.5, 1.5, 0.0, 0.0))


def test_without_dual_clip_a_negative_advantage_is_unbounded() -> None:
    terms, gradient_T = of_ratios(settings_of())
    assert terms.loss_T[-1].item() == pytest.approx(5.0) and gradient_T[-1].item() == pytest.approx(5.0)


def test_dual_clip_leaves_positive_advantages_alone() -> None:
    inputs = single_sample(tokens(math.log(9.0)), tokens(0.0), tokens(1.0))
    terms = LOSSES["clip"](inputs, settings_of(clip_high=100.0, dual_clip=3.0))
    assert terms.loss_T.item() == pytest.approx(-9.0) and not terms.clipped_T.any()


def test_a_token_counts_as_clipped_only_where_clipping_changes_the_minimum() -> None:
    terms, _ = of_ratios(settings_of())
    assert terms.clipped_T.tolist() == [True, False, False, True, False]
    assert terms.clipped_T[:4].double().mean().item() == 0.5


def test_dual_clipping_counts_as_clipping() -> None:
    terms, _ = of_ratios(settings_of(dual_clip=3.0))
    assert terms.clipped_T.tolist() == [True, False, False, True, True]


def test_upper_and_lower_clip_are_two_settings() -> None:
    terms, _ = of_ratios(settings_of(clip_low=0.6, clip_high=0.28))
    torch.testing.assert_close(terms.loss_T.detach(), tokens(-1.28, -0.5, 1.5, 0.5, 5.0))


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("clip", [0.0, 0.2, 1.0])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(name: str, clip: float) -> None:
    logprob_T = tokens(-0.3, -1.0, -2.5, grad=True)
    advantage_T = tokens(1.0, 1.0, -2.0) if name != "gspo" else tokens(-2.0, -2.0, -2.0)
    inputs = single_sample(logprob_T, logprob_T.detach(), advantage_T)
    settings = settings_of(name, clip_low=clip, clip_high=clip)
    assert settings.loss is not None
    terms = LOSSES[settings.loss](inputs, settings)
    terms.loss_T.sum().backward()
    torch.testing.assert_close(logprob_T.grad, -advantage_T)
    torch.testing.assert_close(terms.ratio_T, torch.ones(3, dtype=torch.float64))
    assert not terms.clipped_T.any()


def two_sequences(logprob_T: torch.Tensor, advantages: tuple[float, float]) -> LossInputs:
    """Three tokens and two, of which the middle one of the first is not trained on."""
    old_T = tokens(-1.0, -7.0, -0.5, -2.0, -1.5)
    mask_T = tokens(1, 0, 1, 1, 1)
    index_T = torch.tensor([0, 0, 0, 1, 1])
    advantage_T = tokens(*advantages)[index_T]
    return LossInputs(logprob_T, old_T, advantage_T, mask_T / 4, mask_T, index_T, 2)


def test_gspo_has_one_ratio_per_sequence_the_geometric_mean_over_its_loss_tokens() -> None:
    inputs = two_sequences(tokens(-0.8, 0.0, -0.6, -2.0, -1.1), (1.0, 1.0))
    terms = LOSSES["gspo"](inputs, settings_of("gspo", clip_low=0.5, clip_high=0.5))
    first, second = math.exp((0.2 - 0.1) / 2), math.exp((0.0 + 0.4) / 2)
    torch.testing.assert_close(terms.ratio_T, tokens(first, first, first, second, second))


def test_gspo_clips_whole_sequences() -> None:
    inputs = two_sequences(tokens(-0.8, 0.0, -0.6, -2.0, -1.1), (1.0, 1.0))
    terms = LOSSES["gspo"](inputs, settings_of("gspo", clip_low=0.1, clip_high=0.1))
    assert terms.clipped_T.tolist() == [False, False, False, True, True]
    assert terms.loss_T[3:].tolist() == pytest.approx([-1.1, -1.1])


@pytest.mark.parametrize("clip", [0.5, 0.1])
@pytest.mark.parametrize("advantages", [(1.0, 1.0), (-1.0, 0.5), (-0.3, -2.0)])
def test_gspo_by_tokens_has_value_and_gradient_of_gspo_by_sequences(
    clip: float, advantages: tuple[float, float]
) -> None:
    by_token_T = tokens(-0.8, 0.0, -0.6, -2.0, -1.1, grad=True)
    inputs = two_sequences(by_token_T, advantages)
    terms = LOSSES["gspo"](inputs, settings_of("gspo", clip_low=clip, clip_high=clip))
    weight_T = tokens(1 / 4, 0, 1 / 4, 1 / 4, 1 / 4)  # a mean over sequences of means over two tokens
    loss = (weight_T * terms.loss_T).sum()
    loss.backward()

    by_sequence_T = by_token_T.detach().clone().requires_grad_()
    log_ratio_T = by_sequence_T - inputs.old_logprob_T
    ratio_N = torch.stack([log_ratio_T[[0, 2]].mean(), log_ratio_T[3:].mean()]).exp()
    advantage_N = tokens(*advantages)
    expected = -torch.minimum(ratio_N * advantage_N, ratio_N.clamp(1 - clip, 1 + clip) * advantage_N).mean()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(by_token_T.grad, by_sequence_T.grad)


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    terms, gradient_T = of_ratios(settings_of("cispo", clip_low=0.2, clip_high=0.2))
    weights = (1.2, 0.8, 1.2, 0.8, 1.2)
    expected = tokens(*(-w * a for w, a in zip(weights, ADVANTAGES, strict=True)))
    torch.testing.assert_close(gradient_T, expected)
    torch.testing.assert_close(terms.loss_T.detach(), expected * tokens(*map(math.log, RATIOS)))
    assert terms.clipped_T.all()


def test_cispo_has_no_lower_bound_by_default_and_does_not_count_what_has_no_advantage() -> None:
    logprob_T = tokens(math.log(1e-3), math.log(7.0), math.log(7.0))
    inputs = single_sample(logprob_T, torch.zeros(3, dtype=torch.float64), tokens(1.0, 1.0, 0.0))
    assert LOSSES["cispo"](inputs, settings_of("cispo")).clipped_T.tolist() == [False, True, False]


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
@pytest.mark.parametrize("difference", [100.0, -100.0, 1e4, -1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_policies_far_apart_leave_loss_and_gradient_finite(
    name: str, difference: float, advantage: float
) -> None:
    logprob_T = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = single_sample(logprob_T, logprob_T.detach() - difference, torch.full((2,), advantage))
    settings = settings_of(name)
    assert settings.loss is not None
    terms = LOSSES[settings.loss](inputs, settings)
    terms.loss_T.sum().backward()
    assert logprob_T.grad is not None and logprob_T.grad.isfinite().all()
    assert terms.loss_T.isfinite().all()
    assert terms.ratio_T.max().item() <= math.exp(MAX_LOG_RATIO) * 1.001


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_a_log_prob_that_is_no_number_is_not_hidden(name: str) -> None:
    inputs = single_sample(tokens(math.nan, -1.0), tokens(-1.0, -1.0), tokens(1.0, 1.0))
    settings = settings_of(name)
    assert settings.loss is not None
    assert LOSSES[settings.loss](inputs, settings).loss_T.sum().isnan()


@pytest.mark.parametrize("loss", ["clip", "gspo", "cispo"])
def test_settings_without_a_preset_are_refused(loss: str) -> None:
    inputs = single_sample(tokens(0.0), tokens(0.0), tokens(1.0))
    with pytest.raises(ValueError, match=r"algorithm\.clip_low"):
        LOSSES[loss](inputs, AlgorithmSection())
