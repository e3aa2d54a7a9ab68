"""Case 5: samples over data-parallel ranks, whatever their number."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.batching.cost import CostModel
from paceline.batching.ranks import balance_ranks, heaviest, num_data_parallel_ranks

SEVEN = [10, 9, 8, 7, 6, 5, 4]


def loads(ranks, lengths):
    return [sum(lengths[index] for index in rank) for rank in ranks]


def test_seven_samples_on_three_ranks_reach_the_best_possible_load():
    ranks = balance_ranks(SEVEN, 3)
    assert sorted(map(len, ranks)) == [2, 2, 3]
    assert sorted(index for rank in ranks for index in rank) == list(range(7))
    assert max(loads(ranks, SEVEN)) == 17  # ceil(49 / 3)


def test_equal_mode_gives_every_rank_the_same_number_of_samples():
    ranks = balance_ranks([9, 1, 8, 2, 7, 3], 3, equal_counts=True)
    assert [len(rank) for rank in ranks] == [2, 2, 2]
    assert sorted(loads(ranks, [9, 1, 8, 2, 7, 3])) == [10, 10, 10]


def test_partitions_are_for_data_parallel_ranks_not_for_devices():
    assert len(balance_ranks(SEVEN, num_data_parallel_ranks(6, 2))) == 3
    with pytest.raises(ValueError, match=r"6 devices .* groups of 4"):
        num_data_parallel_ranks(6, 4)


@given(st.lists(st.integers(1, 1000), max_size=50), st.integers(1, 9), st.booleans(), st.floats(0, 1))
def test_every_index_once_and_deterministic(lengths, num_ranks, equal, quadratic):
    cost = CostModel(1.0, quadratic)
    ranks = balance_ranks(lengths, num_ranks, cost=cost, equal_counts=equal)
    assert len(ranks) == num_ranks
    assert sorted(index for rank in ranks for index in rank) == list(range(len(lengths)))
    assert ranks == balance_ranks(lengths, num_ranks, cost=cost, equal_counts=equal)
    counts = [len(rank) for rank in ranks]
    if equal:
        assert max(counts) - min(counts) <= 1
    assert len(lengths) < num_ranks or min(counts) > 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_small_inputs_come_close_to_the_best_possible_load(lengths, num_ranks):
    best = min(
        max(sum(n for n, rank in zip(lengths, choice, strict=True) if rank == r) for r in range(num_ranks))
        for choice in itertools.product(range(num_ranks), repeat=len(lengths))
    )
    assert max(loads(balance_ranks(lengths, num_ranks), lengths)) <= best * 7 / 6


def test_cost_not_length_is_balanced():
    lengths = [12, 6, 6, 6, 6]  # equal squares: 144 against 4 x 36
    ranks = balance_ranks(lengths, 2, cost=CostModel(0.0, 1.0))
    assert sorted(map(len, ranks)) == [1, 4]
    assert heaviest(ranks, [length**2 for length in lengths]) == 144


def test_fewer_samples_than_ranks_leave_ranks_empty():
    assert sorted(map(len, balance_ranks([5, 5], 4))) == [0, 0, 1, 1]
    assert balance_ranks([], 2) == ((), ())
    assert balance_ranks([], 2, equal_counts=True) == ((), ())


@pytest.mark.parametrize(("lengths", "num_ranks"), [([1], 0), ([0], 1)])
def test_no_ranks_and_empty_samples_are_refused(lengths, num_ranks):
    with pytest.raises(ValueError):
        balance_ranks(lengths, num_ranks)


def test_many_long_tailed_samples_are_within_a_percent_of_even():
    lengths = [50 + (index * index * 7919) % 8000 for index in range(1000)]
    totals = loads(balance_ranks(lengths, 64), lengths)
    assert max(totals) <= 1.01 * sum(totals) / 64
