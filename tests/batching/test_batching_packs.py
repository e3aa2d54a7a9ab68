"""Packed rows: the laid-out tokens are bounded strictly, groups stay together where they fit, nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.batching.cost import CostModel
from paceline.batching.micro_batches import OverBudgetError
from paceline.batching.packs import plan_packed_rows
from paceline.batching.prefixes import PackItem, build_pack

SYSTEM = tuple(range(100, 120))


@st.composite
def batches(draw):
    """Prompts that may share a prefix of 20 tokens, and the lengths of their responses."""
    system = SYSTEM if draw(st.booleans()) else ()
    bodies = draw(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), min_size=1, max_size=6))
    prompts = [(*system, number, *body) for number, body in enumerate(bodies)]
    lengths = [draw(st.lists(st.integers(1, 12), min_size=1, max_size=8)) for _ in prompts]
    return prompts, lengths


def laid_out(row, prompts, lengths, share):
    items = [PackItem(prompts[p.group], [[0] * lengths[p.group][r] for r in p.responses]) for p in row]
    return len(build_pack(items, share).token_ids)


def every_response(plan):
    return sorted((part.group, r) for row in plan.rows for part in row for r in part.responses)


@given(batches(), st.integers(45, 120), st.booleans())
def test_rows_are_bounded_by_what_build_pack_lays_out_and_hold_every_response_once(batch, budget, share):
    prompts, lengths = batch
    plan = plan_packed_rows(prompts, lengths, budget, share_prefixes=share)
    sizes = [laid_out(row, prompts, lengths, share) for row in plan.rows]
    assert max(sizes) <= budget
    assert plan.num_laid_out == sum(sizes)
    assert every_response(plan) == [
        (g, r) for g, of_group in enumerate(lengths) for r in range(len(of_group))
    ]
    alone = sum(len(p) * len(of_group) + sum(of_group) for p, of_group in zip(prompts, lengths, strict=True))
    assert plan.num_tokens == alone
    assert plan.num_overlong == 0
    assert plan.effective_share >= 1.0
    if not share:
        assert plan.effective_share == 1.0


@given(batches(), st.integers(45, 120))
def test_a_group_that_fits_a_row_is_never_cut(batch, budget):
    prompts, lengths = batch
    plan = plan_packed_rows(prompts, lengths, budget, share_prefixes=True)
    for group, (prompt, of_group) in enumerate(zip(prompts, lengths, strict=True)):
        parts = [part for row in plan.rows for part in row if part.group == group]
        if len(prompt) + sum(of_group) <= budget:
            assert len(parts) == 1
        for row in plan.rows:
            assert sum(part.group == group for part in row) <= 1


@given(batches(), st.integers(8, 60), st.booleans())
def test_over_long_samples_are_counted_and_stand_alone(batch, budget, share):
    prompts, lengths = batch
    plan = plan_packed_rows(prompts, lengths, budget, share_prefixes=share, overlong="own_micro_batch")
    expected = sum(
        len(p) + n > budget for p, of_group in zip(prompts, lengths, strict=True) for n in of_group
    )
    assert plan.num_overlong == expected
    over = [row for row in plan.rows if laid_out(row, prompts, lengths, share) > budget]
    assert len(over) == expected
    assert all(len(row) == 1 and len(row[0].responses) == 1 for row in over)
    assert every_response(plan) == [
        (g, r) for g, of_group in enumerate(lengths) for r in range(len(of_group))
    ]


def test_a_group_too_big_for_a_row_is_cut_and_each_part_pays_for_its_prompt():
    plan = plan_packed_rows([[1] * 10], [[10, 10, 10, 10]], 30, share_prefixes=True)
    assert sorted(len(part.responses) for row in plan.rows for part in row) == [2, 2]
    assert plan.num_laid_out == 60
    assert plan.num_tokens == 80


def test_sharing_lays_a_prompt_out_once_per_group_and_a_common_prefix_once_per_row():
    prompts = [(*SYSTEM, 1), (*SYSTEM, 2)]
    plan = plan_packed_rows(prompts, [[5, 5], [5, 5]], 1000, share_prefixes=True)
    assert len(plan.rows) == 1
    assert plan.num_laid_out == 20 + 2 + 20
    assert plan.effective_share == pytest.approx(104 / 42)


def test_the_costliest_row_comes_first_prefix_attention_included():
    # the first attends to itself only; the short responses of the second look back at a long prompt
    prompts = [[1], [2] * 60]
    lengths = [[89], [10, 10, 10, 10]]
    plan = plan_packed_rows(prompts, lengths, 100, share_prefixes=True, cost=CostModel(1.0, 1.0))
    assert 90 + 90**2 < 100 + 60**2 + 4 * (70**2 - 60**2)
    assert [row[0].group for row in plan.rows] == [1, 0]


def test_a_sample_longer_than_the_budget_is_refused():
    with pytest.raises(OverBudgetError, match="13 tokens"):
        plan_packed_rows([[1, 2, 3]], [[10, 2]], 12, share_prefixes=True)


def test_planning_is_deterministic():
    prompts, lengths = [[g, 1] for g in range(20)], [[3 + g % 5, 4, 2 + g % 3] for g in range(20)]
    first = plan_packed_rows(prompts, lengths, 40, share_prefixes=True)
    assert first == plan_packed_rows(prompts, lengths, 40, share_prefixes=True)


def test_no_groups_give_no_rows():
    plan = plan_packed_rows([], [], 10, share_prefixes=True)
    assert (plan.rows, plan.num_laid_out, plan.num_overlong, plan.effective_share) == ((), 0, 0, 1.0)


@pytest.mark.parametrize(
    ("prompts", "lengths", "budget"),
    [([[]], [[1]], 9), ([[1]], [[]], 9), ([[1]], [[0]], 9), ([[1]], [[1]], 0), ([[1]], [[1], [1]], 9)],
)
def test_what_cannot_be_laid_out_is_refused(prompts, lengths, budget):
    with pytest.raises(ValueError):
        plan_packed_rows(prompts, lengths, budget, share_prefixes=True)
