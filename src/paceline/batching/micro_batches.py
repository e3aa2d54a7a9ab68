"""Pieces of work into micro-batches under a strict token budget."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.batching.bins import fewest_bins
from paceline.batching.cost import CostModel
from paceline.batching.rebalancing import lightest_first, rebalance

Overlong = Literal["refuse", "own_micro_batch"]


class OverBudgetError(ValueError):
    """A sample is longer than the token budget allows. `padded_from` is its length before it was padded, if it was."""

    def __init__(
        self, length: int, budget: int, sequence_parallel_size: int = 1, *, padded_from: int | None = None
    ) -> None:
        padded = f" ({padded_from} before padding)" if padded_from not in (None, length) else ""
        super().__init__(
            f"a sample of {length} tokens{padded} exceeds the token budget of {budget * sequence_parallel_size} "
            f"(batch.token_budget {budget} per device x sequence parallel {sequence_parallel_size}); raise it to "
            f"{-(-length // sequence_parallel_size)}, or set batch.overlong to own_micro_batch"
        )
        self.length, self.budget, self.sequence_parallel_size = length, budget, sequence_parallel_size


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """`micro_batches[k]` are indices into the lengths, the costliest micro-batch first so that later ones reuse its
    memory. `num_overlong` counts items that exceed the budget and stand alone; `num_tokens` is the sum of all lengths;
    `effective_budget` is the bound of one micro-batch over its sequence-parallel group."""

    micro_batches: tuple[tuple[int, ...], ...]
    num_overlong: int
    num_tokens: int
    effective_budget: int

    @property
    def fill_share(self) -> float:
        """Tokens over what the micro-batches could hold, above 1 only with over-long items; 1.0 for no micro-batch."""
        room = len(self.micro_batches) * self.effective_budget
        return self.num_tokens / room if room else 1.0


def plan_micro_batches(
    lengths: Sequence[int],
    budget: int,
    *,
    overlong: Overlong = "refuse",
    cost: CostModel | None = None,
    item_costs: Sequence[float] | None = None,
    sequence_parallel_size: int = 1,
) -> MicroBatchPlan:
    """Partitions items so that every micro-batch's tokens are at most `budget * sequence_parallel_size`.

    As few micro-batches as `fewest_bins` finds (ceil(total / budget) is only a lower bound, because samples cannot be
    split); the same number is then evened out by `cost` of the lengths, or by `item_costs` where a length does not say
    it all, within the bound. Deterministic. An item over the budget is refused or gets a micro-batch of its own.

    Raises:
        OverBudgetError: `overlong` is "refuse" and an item is longer than the budget.
        ValueError: a length, the budget or the sequence-parallel size is below one.
    """
    _check(lengths, budget, sequence_parallel_size)
    effective = budget * sequence_parallel_size
    if item_costs is None:
        model = cost or CostModel()
        item_costs = [model.cost(length) for length in lengths]
    alone = [index for index, length in enumerate(lengths) if length > effective]
    if alone and overlong == "refuse":
        raise OverBudgetError(max(lengths), budget, sequence_parallel_size)
    fitting = [index for index, length in enumerate(lengths) if length <= effective]
    bins = _even_bins(fitting, lengths, item_costs, effective)
    bins += [[index] for index in alone]
    bins.sort(key=lambda members: (-sum(item_costs[i] for i in members), min(members)))
    return MicroBatchPlan(
        tuple(tuple(sorted(members)) for members in bins), len(alone), sum(lengths), effective
    )


def pad_to_count(micro_batches: Sequence[tuple[int, ...]], count: int) -> tuple[tuple[int, ...], ...]:
    """Appends empty micro-batches up to `count`, the maximum over ranks. An empty one computes nothing, and its rank
    still takes part in every collective.

    Raises:
        ValueError: there are more than `count`: the maximum was not taken over this rank.
    """
    if len(micro_batches) > count:
        raise ValueError(f"{len(micro_batches)} micro-batches cannot be padded to {count}")
    return (*micro_batches, *((),) * (count - len(micro_batches)))


def agree_on_count(plans: Sequence[Sequence[tuple[int, ...]]]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Every rank's micro-batches, padded with empty ones to the same number, so that all call collectives equally
    often. All ranks empty: no micro-batches at all, and no optimiser step to take."""
    count = max(map(len, plans), default=0)
    return tuple(pad_to_count(plan, count) for plan in plans)


def _check(lengths: Sequence[int], budget: int, sequence_parallel_size: int) -> None:
    if budget < 1 or sequence_parallel_size < 1:
        raise ValueError(
            f"the token budget ({budget}) and the sequence-parallel size ({sequence_parallel_size}) are at least 1"
        )
    if lengths and min(lengths) < 1:
        raise ValueError(f"item {lengths.index(min(lengths))} has {min(lengths)} tokens; the least is 1")


def _even_bins(
    items: Sequence[int], lengths: Sequence[int], costs: Sequence[float], capacity: int
) -> list[list[int]]:
    """The fewest bins, the costliest among them made as cheap as moves and swaps can."""
    if not items:
        return []
    order = sorted(items, key=lambda index: (-lengths[index], index))
    bins = fewest_bins(order, lengths, capacity)
    even = lightest_first(order, costs, len(bins), sizes=lengths, capacity=capacity)
    return rebalance(even or bins, costs, sizes=lengths, capacity=capacity)
