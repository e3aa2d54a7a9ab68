"""The padded layout: widths that hold every row, slots within the budget, shares that say what padding costs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.batching.micro_batches import OverBudgetError
from paceline.batching.padding import bucket_width, padded_width, plan_padded, row_total

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


def test_buckets_hold_their_lengths_waste_at_most_a_share_and_are_few():
    for per_doubling in (1, 2, 4, 8):
        widths = [bucket_width(length, per_doubling) for length in range(1, 4097)]
        assert all(
            length <= width <= length * (1 + 1 / per_doubling) for length, width in enumerate(widths, 1)
        )
        assert widths == sorted(widths)
        assert all(bucket_width(width, per_doubling) == width for width in widths)
        assert len(set(widths)) <= per_doubling * 12 + 1
    assert [bucket_width(n) for n in (0, 1, 7, 8, 9, 17, 700, 1024, 1025)] == [
        *(0, 1, 7, 8, 10, 20, 768, 1024, 1280)
    ]


@pytest.mark.parametrize(("length", "per_doubling"), [(-1, 4), (3, 3), (3, 0)])
def test_buckets_that_do_not_exist_are_refused(length, per_doubling):
    with pytest.raises(ValueError):
        bucket_width(length, per_doubling)


@given(LENGTHS, st.integers(32, 200), st.sampled_from([1, 4, 16]), st.sampled_from([None, 1, 3]))
def test_bucketed_micro_batches_keep_the_budget_and_repeat_shapes(lengths, budget, align, forced_rows):
    plan = plan_padded(lengths, budget, pad_to="bucket", align=align, forced_rows=forced_rows)
    assert sorted(i for m in plan.micro_batches for i in m.rows) == list(range(len(lengths)))
    assert max(slots(plan), default=0) <= budget
    rows_of_width = {}
    for micro_batch in plan.micro_batches:
        longest = max(lengths[index] for index in micro_batch.rows)
        assert longest <= micro_batch.width and micro_batch.width % align == 0
        assert len(micro_batch.rows) <= micro_batch.num_rows
        if forced_rows is not None:
            rows_of_width.setdefault(micro_batch.width, set()).add(micro_batch.num_rows)
    assert all(len(numbers) == 1 for numbers in rows_of_width.values())  # the width says the rest
    assert len(plan.shapes) == len({(m.num_rows, m.width) for m in plan.micro_batches})


def test_a_sample_that_fits_the_budget_is_never_pushed_over_it_by_its_bucket():
    plan = plan_padded([1000, 900], 1000, pad_to="bucket")
    assert [m.width for m in plan.micro_batches] == [
        1000,
        1000,
    ]  # buckets 1024 do not fit; the budget is the last one
    assert plan_padded([9], 18, pad_to="bucket", align=8).micro_batches[0].width == 16
    with pytest.raises(OverBudgetError, match=r"16 tokens \(9 before padding\)"):
        plan_padded([9], 15, pad_to="bucket", align=8)


def test_many_lengths_become_one_shape_with_forced_rows_and_the_mini_batch_width():
    lengths = list(range(40, 72))
    own = plan_padded(lengths, 4 * 71, pad_to="micro_batch")
    bucket = plan_padded(lengths, 4 * 80, pad_to="bucket", forced_rows=4)
    mini = plan_padded(lengths, 4 * 71, pad_to="mini_batch", forced_rows=4)
    assert len(own.shapes) >= 6
    assert len(bucket.shapes) <= 4
    assert mini.shapes == {(4, 71)}
    assert len(plan_padded(lengths[:-1], 4 * 71, pad_to="mini_batch", longest=71, forced_rows=4).shapes) == 1


def test_rows_are_forced_only_as_far_as_the_budget_holds_them():
    plan = plan_padded([10, 4, 4], 20, forced_rows=4)
    assert [(m.num_rows, m.width) for m in plan.micro_batches] == [(2, 10), (4, 4)]
    alone = plan_padded([30, 4], 20, forced_rows=4, overlong="own_micro_batch")
    assert [(m.num_rows, m.width) for m in alone.micro_batches] == [(1, 30), (4, 4)]
    assert alone.num_overlong == 1


def test_ranks_pad_to_the_longest_of_all_of_them_and_an_empty_rank_is_safe():
    """The mini-batch's maximum is over all data ranks; every rank knows all lengths."""
    by_rank = [[9, 3], [5], []]
    longest = max(length for lengths in by_rank for length in lengths)
    plans = [plan_padded(lengths, 24, pad_to="mini_batch", align=4, longest=longest) for lengths in by_rank]
    assert [{m.width for m in plan.micro_batches} for plan in plans] == [{12}, {12}, set()]
    with pytest.raises(ValueError, match="shorter than one of this rank"):
        plan_padded([9], 24, longest=5)


def test_every_rank_refuses_alike_when_one_of_them_has_a_sample_over_the_width_or_the_budget():
    for lengths in ([9, 3], [5], []):
        with pytest.raises(ValueError, match=r"forced width 8 .* raise it to 9"):
            plan_padded(lengths, 64, forced_width=8, longest=9)
    for lengths in ([21, 3], [3]):
        with pytest.raises(OverBudgetError, match=r"a sample of 24 tokens \(21 before padding\)"):
            plan_padded(lengths, 20, pad_to="mini_batch", align=8, longest=21)


def test_case_4_one_sample_longer_than_the_budget_of_its_sequence_parallel_group():
    budget, align = 20, 2  # 10 tokens per device, two devices share a sequence
    assert slots(plan_padded([20], budget, align=align)) == [20]
    with pytest.raises(OverBudgetError, match=r"22 tokens \(21 before padding\)"):
        plan_padded([21], budget, align=align)
    plan = plan_padded([21, 3, 3], budget, align=align, overlong="own_micro_batch")
    assert [m.rows for m in plan.micro_batches] == [(0,), (1, 2)]
    assert (plan.num_overlong, plan.num_tokens) == (1, 27)


def test_one_long_sample_costs_its_width_in_every_row():
    lengths = [2048, *[1024] * 15]
    own = plan_padded(lengths, 4096, pad_to="micro_batch", forced_rows=2)
    mini = plan_padded(lengths, 4096, pad_to="mini_batch", forced_rows=2)
    assert mini.num_slots / own.num_slots == pytest.approx(32768 / 18432)


@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([1, 7, 64]), st.sampled_from([1, 2, 4]))
def test_a_packed_row_is_filled_up_to_few_totals_and_never_over_a_budget_it_keeps(
    num_tokens, per_rank, multiple, align
):
    budget = per_rank * align  # the budget of a sequence-parallel group
    total = row_total(num_tokens, budget, multiple=multiple, align=align)
    assert total >= num_tokens and total % align == 0
    if num_tokens <= budget:
        assert total <= budget
    assert multiple > 1 or total == padded_width([num_tokens], align=align)
    totals = {row_total(n, budget, multiple=multiple, align=align) for n in range(1, budget + 1)}
    assert len(totals) <= -(-budget // multiple) + 1
