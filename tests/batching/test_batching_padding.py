"""The padded layout: widths that hold every row, slots within the budget, shares that say what padding costs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.batching.micro_batches import OverBudgetError
from paceline.batching.padding import padded_width, plan_padded

LENGTHS = st.lists(st.integers(1, 30), max_size=30)


def slots(plan):
    return [micro_batch.num_slots for micro_batch in plan.micro_batches]


@given(
    LENGTHS, st.integers(32, 200), st.sampled_from(["micro_batch", "mini_batch"]), st.sampled_from([1, 4, 8])
)
def test_rows_times_width_never_exceed_the_budget_and_every_row_fits_its_width(
    lengths, budget, pad_to, align
):
    plan = plan_padded(lengths, budget, pad_to=pad_to, align=align)
    assert sorted(i for m in plan.micro_batches for i in m.rows) == list(range(len(lengths)))
    assert max(slots(plan), default=0) <= budget
    for micro_batch in plan.micro_batches:
        longest = max(lengths[index] for index in micro_batch.rows)
        assert micro_batch.width % align == 0
        if pad_to == "micro_batch":
            assert longest <= micro_batch.width < longest + align
        else:
            assert micro_batch.width == padded_width(lengths, align=align)
    assert plan.num_tokens == sum(lengths)
    assert plan.num_slots == sum(slots(plan))
    assert 0 < plan.effective_share <= 1


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(9, 20))
def test_small_inputs_get_the_fewest_micro_batches_and_then_the_fewest_slots(lengths, budget):
    def partitions(items):
        if not items:
            yield []
            return
        for rest in partitions(items[1:]):
            yield [[items[0]], *rest]
            for k in range(len(rest)):
                yield [*rest[:k], [items[0], *rest[k]], *rest[k + 1 :]]

    costs = []
    for parts in partitions(lengths):
        sizes = [len(part) * max(part) for part in parts]
        if max(sizes) <= budget:
            costs.append((len(parts), sum(sizes)))
    plan = plan_padded(lengths, budget)
    assert (len(plan.micro_batches), plan.num_slots) == min(costs)


def test_the_raw_maximum_is_taken_before_alignment():
    assert padded_width([5, 9, 3], align=8) == 16
    assert padded_width([8], align=8) == 8
    assert padded_width([], align=8) == 0
    assert padded_width([3], forced_width=5, align=4) == 8


def test_micro_batch_widths_save_slots_over_the_mini_batch_width():
    lengths = [100, 10, 10, 10, 10]
    own = plan_padded(lengths, 100)
    common = plan_padded(lengths, 100, pad_to="mini_batch")
    assert own.num_slots == 140
    assert common.num_slots == 500
    assert own.effective_share == pytest.approx(1.0)
    assert common.effective_share == pytest.approx(0.28)


def test_a_forced_width_less_than_a_sample_is_refused_with_the_width_it_needs():
    with pytest.raises(ValueError, match=r"forced width 5 .* raise it to 8"):
        plan_padded([3, 8], 100, forced_width=5)
    assert plan_padded([3, 8], 100, forced_width=12).micro_batches[0].width == 12


def test_a_row_over_the_budget_is_refused_or_alone_and_counted():
    with pytest.raises(OverBudgetError, match=r"16 tokens \(10 before padding\)"):
        plan_padded([10, 3], 12, align=8)
    plan = plan_padded([10, 3, 3], 8, overlong="own_micro_batch")
    assert plan.num_overlong == 1
    assert plan.micro_batches[0].rows == (0,)
    assert slots(plan) == [10, 6]


def test_an_empty_mini_batch_gives_an_empty_plan():
    plan = plan_padded([], 8, pad_to="mini_batch")
    assert (plan.micro_batches, plan.num_slots, plan.effective_share) == ((), 0, 1.0)


@pytest.mark.parametrize(("lengths", "budget", "align"), [([0], 8, 1), ([1], 0, 1), ([1], 8, 0)])
def test_sizes_below_one_are_refused(lengths, budget, align):
    with pytest.raises(ValueError):
        plan_padded(lengths, budget, align=align)
