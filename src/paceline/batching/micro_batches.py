"""Pieces of work into micro-batches under a strict token budget."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.batching.cost import CostModel

Overlong = Literal["refuse", "own_micro_batch"]


class OverBudgetError(ValueError):
    """A sample is longer than the token budget allows."""

    def __init__(self, length: int, budget: int, sequence_parallel_size: int = 1) -> None:
        effective = budget * sequence_parallel_size
        super().__init__(
            f"a sample of {length} tokens exceeds the token budget of {effective} "
            f"(batch.token_budget {budget} per device x sequence parallel {sequence_parallel_size}); raise it to "
            f"{-(-length // sequence_parallel_size)}, or set batch.overlong to own_micro_batch"
        )
        self.length, self.budget, self.sequence_parallel_size = length, budget, sequence_parallel_size


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """`micro_batches[k]` are indices into the lengths, the costliest micro-batch first so that later ones reuse its
    memory. `num_overlong` counts items that exceed the budget and stand alone."""

    micro_batches: tuple[tuple[int, ...], ...]
    num_overlong: int


def plan_micro_batches(
    lengths: Sequence[int],
    budget: int,
    *,
    overlong: Overlong = "refuse",
    cost: CostModel | None = None,
    sequence_parallel_size: int = 1,
) -> MicroBatchPlan:
    """Partitions items so that every micro-batch's tokens are at most `budget * sequence_parallel_size`.

    Best-fit decreasing keeps their number near the least possible (never above 11/9 of it + 1; ceil(total / budget)
    is only a lower bound, because samples cannot be split); the same number is then spread evenly by `cost` where
    that keeps the bound. Deterministic. An item over the budget is refused or gets a micro-batch of its own.

    Raises:
        OverBudgetError: `overlong` is "refuse" and an item is longer than the budget.
        ValueError: a length or the budget is below one token.
    """
    effective = budget * sequence_parallel_size
    if effective < 1 or any(length < 1 for length in lengths):
        raise ValueError(f"lengths and the budget must be at least one token (budget {effective})")
    cost = cost or CostModel()
    alone = [index for index, length in enumerate(lengths) if length > effective]
    if alone and overlong == "refuse":
        raise OverBudgetError(max(lengths), budget, sequence_parallel_size)
    order = sorted(
        (index for index, length in enumerate(lengths) if length <= effective),
        key=lambda index: (-lengths[index], index),
    )
    bins = _best_fit(order, lengths, effective)
    bins = _spread(order, lengths, effective, cost, len(bins)) or bins
    bins += [[index] for index in alone]
    bins.sort(key=lambda members: (-sum(cost.cost(lengths[i]) for i in members), members))
    return MicroBatchPlan(tuple(tuple(sorted(members)) for members in bins), len(alone))


def _best_fit(order: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Each item, longest first, into the fullest bin that still takes it."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index in order:
        fitting = [(free[k], k) for k in range(len(bins)) if free[k] >= lengths[index]]
        if fitting:
            _, chosen = min(fitting)
        else:
            chosen = len(bins)
            bins.append([])
            free.append(budget)
        bins[chosen].append(index)
        free[chosen] -= lengths[index]
    return bins


def _spread(
    order: Sequence[int], lengths: Sequence[int], budget: int, cost: CostModel, num_bins: int
) -> list[list[int]] | None:
    """Each item, longest first, into the cheapest of `num_bins` bins that still takes it; None if one fits nowhere."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    free = [budget] * num_bins
    spent = [0.0] * num_bins
    for index in order:
        fitting = [(spent[k], k) for k in range(num_bins) if free[k] >= lengths[index]]
        if not fitting:
            return None
        _, chosen = min(fitting)
        bins[chosen].append(index)
        free[chosen] -= lengths[index]
        spent[chosen] += cost.cost(lengths[index])
    return bins
