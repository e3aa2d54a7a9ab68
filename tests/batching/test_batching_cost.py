"""What the cost model says, and that it can be fitted to measurements."""

import pytest

from paceline.batching.cost import CostModel


def test_cost_is_linear_plus_quadratic():
    assert CostModel(2.0, 0.5).cost(10) == 70.0


def test_a_sequence_costs_the_same_however_it_is_cut_into_prefix_and_continuation():
    model = CostModel(3.0, 0.25)
    assert model.cost(30) + model.cost(12, 30) == model.cost(42)


def test_sizes_give_the_flops_of_causal_attention():
    # case 36: 137,728 matmul parameters; 2 layers of 4 heads x 16; lengths 100 and 300
    model = CostModel.from_sizes(137_728, 2, 4, 16)
    assert 3 * (model.cost(100) + model.cost(300)) == 330_547_200 + 76_800_000


def test_a_fit_recovers_both_terms_also_where_lengths_are_long():
    true = CostModel(2e-5, 3e-9)
    batches = [[100, 200], [4000], [1000] * 8, [16_000, 50], [30_000]]
    seconds = [sum(true.cost(length) for length in batch) for batch in batches]
    found = CostModel.fit(batches, seconds)
    assert found.linear == pytest.approx(true.linear, rel=1e-6)
    assert found.quadratic == pytest.approx(true.quadratic, rel=1e-6)


def test_a_fit_is_never_negative():
    assert CostModel.fit([[10], [20], [40]], [10.0, 15.0, 20.0]).quadratic == 0.0
    rising = CostModel.fit([[10], [20], [40]], [1.0, 8.0, 64.0])
    assert rising.linear == 0.0
    assert rising.quadratic > 0.0
    single = CostModel.fit([[10]], [2.0])
    assert single.cost(10) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("batches", "seconds"), [([], []), ([[1]], []), ([[]], [1.0]), ([[5]], [0.0]), ([[5]], [float("nan")])]
)
def test_what_cannot_be_fitted_is_refused(batches, seconds):
    with pytest.raises(ValueError):
        CostModel.fit(batches, seconds)


@pytest.mark.parametrize(
    ("linear", "quadratic"), [(-1.0, 0.0), (0.0, 0.0), (float("nan"), 1.0), (1.0, float("inf"))]
)
def test_meaningless_coefficients_are_refused(linear, quadratic):
    with pytest.raises(ValueError):
        CostModel(linear, quadratic)
