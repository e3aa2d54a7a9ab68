"""Cases 3, 4 and 1: a strict bound, as few micro-batches as possible, over-long items declared, ranks in step."""

import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.batching.bins import best_fit, bins_at_least, fewest_bins
from paceline.batching.cost import CostModel
from paceline.batching.micro_batches import (
    OverBudgetError,
    agree_on_count,
    pad_to_count,
    plan_micro_batches,
)

LENGTHS = st.lists(st.integers(1, 40), max_size=60)


def sums(plan, lengths):
    return [sum(lengths[index] for index in members) for members in plan.micro_batches]


def indices(plan):
    return sorted(index for members in plan.micro_batches for index in members)


def least_number_of_bins(sizes, capacity):
    """Dynamic programming over subsets: the least (bins closed, tokens in the open one)."""

    @cache
    def best(subset):
        if not subset:
            return (1, 0)
        found = []
        for index, size in enumerate(sizes):
            if subset >> index & 1:
                bins, used = best(subset & ~(1 << index))
                found.append((bins, used + size) if used + size <= capacity else (bins + 1, size))
        return min(found)

    return best((1 << len(sizes)) - 1)[0] if sizes else 0


@pytest.mark.parametrize(
    ("lengths", "budget", "count"),
    [([7] * 8, 8, 8), ([6, 6, 6], 10, 3), ([5, 5, 5, 5, 4], 10, 3), ([], 10, 0), ([10], 10, 1)],
)
def test_the_budget_is_strict_and_the_count_is_the_least(lengths, budget, count):
    plan = plan_micro_batches(lengths, budget)
    assert len(plan.micro_batches) == count
    assert max(sums(plan, lengths), default=0) <= budget
    assert indices(plan) == list(range(len(lengths)))
    assert plan.num_overlong == 0


@given(LENGTHS, st.integers(40, 120), st.floats(0, 1))
def test_every_index_once_never_over_the_budget_never_an_empty_micro_batch(lengths, budget, quadratic):
    plan = plan_micro_batches(lengths, budget, cost=CostModel(1.0, quadratic))
    assert indices(plan) == list(range(len(lengths)))
    assert all(1 <= total <= budget for total in sums(plan, lengths))
    assert plan.num_tokens == sum(lengths)
    assert plan == plan_micro_batches(lengths, budget, cost=CostModel(1.0, quadratic))


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(1, 30), max_size=9), st.integers(30, 60))
def test_small_inputs_get_the_least_number_of_micro_batches(lengths, budget):
    least = least_number_of_bins(tuple(lengths), budget)
    assert len(plan_micro_batches(lengths, budget).micro_batches) == least
    assert bins_at_least(lengths, budget) <= least


@given(LENGTHS, st.integers(40, 120))
def test_the_count_is_never_above_best_fit_nor_below_the_bound(lengths, budget):
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    count = len(fewest_bins(order, lengths, budget))
    assert math.ceil(sum(lengths) / budget) <= bins_at_least(lengths, budget) <= count
    assert count <= len(best_fit(order, lengths, budget))


def test_best_fit_takes_the_fullest_bin_that_has_room():
    assert best_fit(range(5), [7, 6, 3, 3, 1], 10) == [[0, 2], [1, 3, 4]]
    assert best_fit(range(4), [6, 8, 2, 4], 10) == [[0, 3], [1, 2]]


def test_the_search_finds_a_packing_that_best_fit_misses():
    # larger bins can mislead decreasing fits: these need 3 bins of 60, and best fit takes 4 of 61
    sizes = [44, 24, 24, 22, 21, 17, 8, 8, 6, 6]
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    assert len(best_fit(order, sizes, 61)) == 4 > len(fewest_bins(order, sizes, 61)) == 3


def test_the_search_finds_packings_that_leave_no_room_at_all():
    sizes = [5, 4, 4, 3, 2, 2]  # 5 + 3 + 2 and 4 + 4 + 2; best fit begins with 5 + 4
    assert len(best_fit(range(6), sizes, 10)) == 3 > len(fewest_bins(range(6), sizes, 10)) == 2


def test_the_same_number_of_micro_batches_is_evened_out_by_cost_and_the_costliest_comes_first():
    lengths = [8, 8, 1, 1, 1, 1, 1, 1, 1, 1]
    plan = plan_micro_batches(lengths, 12)
    assert sums(plan, lengths) == [12, 12]
    squares = plan_micro_batches([6, 4, 4, 4, 4, 2, 2, 2, 2, 2], 20, cost=CostModel(0.0, 1.0))
    lengths = [6, 4, 4, 4, 4, 2, 2, 2, 2, 2]
    costs = [sum(lengths[index] ** 2 for index in members) for members in squares.micro_batches]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] - costs[-1] <= 4


@given(LENGTHS, st.integers(40, 120))
def test_evening_out_never_makes_the_costliest_micro_batch_dearer_than_a_full_one(lengths, budget):
    plan = plan_micro_batches(lengths, budget)
    totals = sums(plan, lengths)
    assert totals == sorted(totals, reverse=True)
    if len(totals) > 1:
        assert totals[0] - totals[-1] <= max(lengths)


def test_item_costs_replace_what_follows_from_lengths():
    plan = plan_micro_batches([1, 1, 1, 1], 2, item_costs=[10.0, 10.0, 1.0, 1.0])
    assert sorted(map(sorted, plan.micro_batches)) in ([[0, 2], [1, 3]], [[0, 3], [1, 2]])


def test_a_sequence_as_long_as_the_effective_budget_fits():
    plan = plan_micro_batches([20], 10, sequence_parallel_size=2)
    assert plan.micro_batches == ((0,),)
    assert (plan.num_overlong, plan.effective_budget, plan.fill_share) == (0, 20, 1.0)


def test_a_longer_one_is_refused_with_every_number_that_matters():
    with pytest.raises(OverBudgetError, match=r"21 tokens .* 20 \(.* 10 .* 2\)") as caught:
        plan_micro_batches([3, 21, 3], 10, sequence_parallel_size=2)
    assert (caught.value.length, caught.value.budget, caught.value.sequence_parallel_size) == (21, 10, 2)
    assert "raise it to 11" in str(caught.value)


def test_in_soft_mode_it_gets_its_own_micro_batch_and_is_counted_and_no_token_is_lost():
    lengths = [21, 3, 3]
    plan = plan_micro_batches(lengths, 10, overlong="own_micro_batch", sequence_parallel_size=2)
    assert plan.num_overlong == 1
    assert plan.micro_batches == ((0,), (1, 2))
    assert sum(sums(plan, lengths)) == plan.num_tokens == 27


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 60))
def test_soft_mode_bounds_everything_but_the_over_long(lengths, budget):
    plan = plan_micro_batches(lengths, budget, overlong="own_micro_batch")
    assert indices(plan) == list(range(len(lengths)))
    assert plan.num_overlong == sum(length > budget for length in lengths)
    for members, total in zip(plan.micro_batches, sums(plan, lengths), strict=True):
        assert total <= budget or len(members) == 1


@pytest.mark.parametrize(
    ("lengths", "budget", "size"), [([0], 8, 1), ([3, -1], 8, 1), ([3], 0, 1), ([3], 8, 0)]
)
def test_lengths_and_budgets_below_one_are_refused(lengths, budget, size):
    with pytest.raises(ValueError):
        plan_micro_batches(lengths, budget, sequence_parallel_size=size)


@pytest.mark.parametrize(
    ("ranks", "budget", "count"),
    [
        ([[9, 8], [3]], 10, 2),
        ([[9, 8], []], 10, 2),
        ([[7, 7, 7], [2, 2, 2]], 8, 3),
        ([[], []], 10, 0),
    ],
)
def test_every_rank_gets_the_same_number_of_micro_batches(ranks, budget, count):
    plans = agree_on_count([plan_micro_batches(lengths, budget).micro_batches for lengths in ranks])
    assert [len(plan) for plan in plans] == [count, count]
    total = sum(lengths[i] for plan, lengths in zip(plans, ranks, strict=True) for m in plan for i in m)
    assert total == sum(map(sum, ranks))  # empty micro-batches add nothing to numerator or denominator
    for plan in plans:
        assert () not in plan or not any(plan[plan.index(()) :])  # filler comes last


def test_padding_to_fewer_than_there_are_is_refused():
    assert agree_on_count([]) == ()
    with pytest.raises(ValueError, match="2 micro-batches"):
        pad_to_count([(0,), (1,)], 1)


def test_large_inputs_are_planned_quickly_and_well():
    lengths = [64 + 37 * index % 4000 for index in range(2000)]
    plan = plan_micro_batches(lengths, 16_384)
    assert plan.fill_share > 0.98
