"""Weights of the aggregations; what is and what is not in a denominator."""

import pytest
import torch
from algorithm_cases import on_policy, settings_of, tokens
from torch import Tensor

from paceline.algorithms.denominators import Denominator, aggregation_weights
from paceline.algorithms.objective import ObjectiveOutput, policy_objective
from paceline.config.schema import Aggregation

AGGREGATIONS: list[Aggregation] = [
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
]
TOKEN_MEAN = settings_of("dapo", clip_high=0.2)


def token_mean_part(loss_T: Tensor, num_tokens: int, logprob_T: Tensor | None = None) -> ObjectiveOutput:
    """One micro-batch's part of a token mean over `num_tokens`, its tokens in one sample."""
    logprob_T = torch.zeros_like(loss_T, requires_grad=True) if logprob_T is None else logprob_T
    counts = Denominator(num_tokens, 1, 1, 100)
    inputs = on_policy(logprob_T, loss_T, torch.ones_like(loss_T), [len(loss_T)], counts, "token-mean")
    return policy_objective(inputs, torch.zeros_like(loss_T), None, TOKEN_MEAN)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [1 / 4, 1 / 4, 0.0, 1 / 4, 1 / 4]),
        ("seq-mean-token-mean", [1 / 2, 0.0, 0.0, 1 / 2 / 3, 1 / 2 / 3]),
        ("seq-mean-token-sum", [1 / 2, 1 / 2, 0.0, 1 / 2, 1 / 2]),
        ("seq-mean-token-sum-norm", [1 / 20, 1 / 20, 0.0, 1 / 20, 1 / 20]),
    ],
)
def test_weights_follow_their_formula(aggregation: Aggregation, expected: list[float]) -> None:
    mask_T = tokens(1, 1, 0, 1, 1)
    lengths_N = tokens(2, 2)
    if aggregation == "seq-mean-token-mean":  # a first sample of one loss token, a second of three
        mask_T, lengths_N = tokens(1, 0, 0, 1, 1), tokens(1, 3)
    index_T = torch.tensor([0, 0, 0, 1, 1])
    weight_T = aggregation_weights(aggregation, index_T, mask_T, lengths_N, Denominator(4, 2, 1, 10))
    torch.testing.assert_close(weight_T, tokens(*expected))


def test_a_constant_length_divides_whatever_was_sampled() -> None:
    one = aggregation_weights(
        "seq-mean-token-sum-norm", torch.tensor([0]), tokens(1), tokens(1), Denominator(1, 1, 1, 8)
    )
    many = aggregation_weights(
        "seq-mean-token-sum-norm",
        torch.zeros(6, dtype=torch.long),
        tokens(*[1] * 6),
        tokens(6),
        Denominator(6, 1, 1, 8),
    )
    assert one[0] == many[0] == 1 / 8


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_mask_of_any_type_gives_float_weights(aggregation: Aggregation, dtype: torch.dtype) -> None:
    mask_T = torch.tensor([1, 0, 1]).to(dtype)
    weight_T = aggregation_weights(
        aggregation, torch.tensor([0, 0, 1]), mask_T, torch.tensor([1.0, 1.0]), Denominator(2, 2, 1, 4)
    )
    assert weight_T.dtype == torch.float32 and weight_T[1] == 0.0 and weight_T[0] > 0.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_nothing_to_count_gives_weights_of_exactly_zero(aggregation: Aggregation) -> None:
    weight_T = aggregation_weights(
        aggregation, torch.tensor([0, 0, 1]), tokens(0, 0, 0), tokens(0, 0), Denominator(0, 0, 0, 16)
    )
    assert torch.equal(weight_T, tokens(0, 0, 0))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_empty_micro_batch_gives_no_weights(aggregation: Aggregation) -> None:
    index_T = torch.zeros(0, dtype=torch.long)
    assert aggregation_weights(aggregation, index_T, tokens(), tokens(), Denominator(4, 2, 1, 8)).shape == (
        0,
    )


def test_an_unknown_aggregation_is_refused() -> None:
    with pytest.raises(ValueError, match="mean-of-means"):
        aggregation_weights("mean-of-means", torch.tensor([0]), tokens(1), tokens(1), Denominator(1, 1, 1, 1))  # type: ignore[arg-type]


def test_negative_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        Denominator(-1, 0, 0, 0)


def test_a_token_mean_is_over_all_tokens_of_the_update_not_over_micro_batches() -> None:
    parts = [token_mean_part(tokens(*[2.0] * 100), 1000), token_mean_part(tokens(*[0.5] * 900), 1000)]
    assert sum(part.loss.item() for part in parts) == pytest.approx(0.65)


def test_a_rank_with_few_tokens_weighs_little() -> None:
    parts = [token_mean_part(tokens(4.0), 4), token_mean_part(tokens(0.0, 0.0, 0.0), 4)]
    assert sum(part.loss.item() for part in parts) == pytest.approx(1.0)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 4])
def test_nothing_divides_by_the_number_of_micro_batches(num_micro_batches: int) -> None:
    w = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    logged = 0.0
    for _ in range(num_micro_batches):
        size = 4 // num_micro_batches
        output = token_mean_part(tokens(*[1.0] * size), 4, logprob_T=w.expand(size))
        output.loss.backward()
        logged += output.metrics["loss/total"][0]
    assert w.grad is not None and w.grad.item() == pytest.approx(1.0)
    assert logged == pytest.approx(1.0)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_a_masked_sample_is_in_neither_numerator_nor_denominator(aggregation: Aggregation) -> None:
    mask_T = tokens(*[1] * 4, *[0] * 6)
    logprob_T = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    counts = Denominator(num_tokens=4, num_sequences=1, num_groups=1, max_response_tokens=6)
    inputs = on_policy(logprob_T, torch.ones_like(mask_T), mask_T, [4, 6], counts, aggregation)
    output = policy_objective(inputs, torch.zeros_like(mask_T), None, settings_of())
    assert output.loss.item() == pytest.approx(1.0)
    assert output.metrics["clip_fraction"][1] == 4


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_masked_samples_alone_give_loss_and_gradient_of_exactly_zero(
    name: str, aggregation: Aggregation
) -> None:
    mask_T = tokens(*[0] * 10)
    logprob_T = torch.full((10,), -3.0, dtype=torch.float64, requires_grad=True)
    inputs = on_policy(
        logprob_T, torch.ones_like(mask_T), mask_T, [4, 6], Denominator(0, 0, 0, 6), aggregation
    )
    settings = settings_of(name, kl_coefficient=0.1)
    output = policy_objective(inputs, torch.ones_like(mask_T), torch.zeros_like(mask_T), settings)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert logprob_T.grad is not None and torch.equal(logprob_T.grad, torch.zeros_like(mask_T))
    assert set(output.metrics) == {"loss/total", "loss/policy", "loss/kl"}
