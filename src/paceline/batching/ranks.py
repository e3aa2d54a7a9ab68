"""Samples (or groups of them) over data-parallel ranks, so that no rank has much more to compute than another."""

import math
from collections.abc import Sequence

from paceline.batching.cost import CostModel
from paceline.batching.rebalancing import lightest_first, rebalance


def num_data_parallel_ranks(num_devices: int, sequence_parallel_size: int) -> int:
    """How many ways samples are split: devices that share a sequence hold the same samples.

    Raises:
        ValueError: the devices cannot be divided into such groups.
    """
    if num_devices < 1 or sequence_parallel_size < 1 or num_devices % sequence_parallel_size:
        raise ValueError(
            f"{num_devices} devices cannot be divided into sequence-parallel groups of {sequence_parallel_size}"
        )
    return num_devices // sequence_parallel_size


def balance_ranks(
    lengths: Sequence[int],
    num_ranks: int,
    *,
    cost: CostModel | None = None,
    equal_counts: bool = False,
) -> tuple[tuple[int, ...], ...]:
    """One tuple of indices into `lengths` per rank, every index once, the heaviest rank's cost as low as can be found.

    Ranks get different numbers of samples unless `equal_counts`, which keeps the numbers within one of each other
    (equal when they divide). With fewer samples than ranks some ranks are empty. Deterministic.

    Raises:
        ValueError: no ranks, or a length below one token.
    """
    if lengths and min(lengths) < 1:
        raise ValueError(f"item {lengths.index(min(lengths))} has {min(lengths)} tokens; the least is 1")
    model = cost or CostModel()
    return balance_costs([model.cost(length) for length in lengths], num_ranks, equal_counts=equal_counts)


def balance_costs(
    costs: Sequence[float], num_ranks: int, *, equal_counts: bool = False
) -> tuple[tuple[int, ...], ...]:
    """`balance_ranks` where a length does not say what an item costs."""
    if num_ranks < 1:
        raise ValueError(f"samples cannot be spread over {num_ranks} ranks")
    order = sorted(range(len(costs)), key=lambda index: (-costs[index], index))
    parts = _deal(order, costs, num_ranks) if equal_counts else lightest_first(order, costs, num_ranks)
    assert parts is not None  # without a capacity everything fits
    found = rebalance(parts, costs, only_swaps=equal_counts)
    return tuple(tuple(sorted(part)) for part in found)


def heaviest(parts: Sequence[Sequence[int]], costs: Sequence[float]) -> float:
    """Cost of the heaviest part."""
    return max(math.fsum(costs[index] for index in part) for part in parts)


def _deal(order: Sequence[int], costs: Sequence[float], num_ranks: int) -> list[list[int]]:
    """Rounds of one item per rank, the costliest item of a round to the lightest rank."""
    parts: list[list[int]] = [[] for _ in range(num_ranks)]
    spent = [0.0] * num_ranks
    for start in range(0, len(order), num_ranks):
        lightest = sorted(range(num_ranks), key=lambda rank: (spent[rank], rank))
        for index, rank in zip(order[start : start + num_ranks], lightest, strict=False):
            parts[rank].append(index)
            spent[rank] += costs[index]
    return parts
