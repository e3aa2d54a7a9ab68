"""Bin packing: items of given sizes into as few bins of one capacity as can be found."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from itertools import accumulate

_MAX_NODES = 20_000
"""Placements tried per number of bins: some hundredths of a second. Counted rather than timed: deterministic."""


def fewest_bins(order: Sequence[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of the items in `order` (indices into `sizes`, largest first, none above `capacity`).

    Best-fit decreasing never needs more than 11/9 of the least number + 4 (Johnson et al. 1974). Where it needs more
    than a lower bound, a bounded depth-first search tries fewer: with up to a dozen items it is exhaustive, and the
    number is the least.
    """
    bins = best_fit(order, sizes, capacity)
    bound = bins_at_least([sizes[index] for index in order], capacity)
    while len(bins) > bound:
        fewer = _Search(order, sizes, capacity, len(bins) - 1).run()
        if fewer is None:
            break
        bins = fewer
    return bins


def best_fit(order: Sequence[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Each item of `order` into the fullest bin that still takes it, the earliest among equals."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # ascending (capacity left, bin)
    for index in order:
        place = bisect_left(free, (sizes[index], -1))
        if place < len(free):
            left, chosen = free.pop(place)
        else:
            left, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(index)
        insort(free, (left - sizes[index], chosen))
    return bins


def bins_at_least(sizes: Sequence[int], capacity: int) -> int:
    """A lower bound on the number of bins (L2 of Martello and Toth 1990).

    ceil(total / capacity) alone ignores that items cannot be split. For a threshold k, items above capacity - k take a
    bin that has no room for any item of k or more, and items above half the capacity a bin each.
    """
    ascending = sorted(sizes)
    totals = [0, *accumulate(ascending)]
    half = bisect_right(ascending, capacity // 2)  # items from here on are above half the capacity
    best = -(-totals[-1] // capacity)
    for k in {0, *ascending[:half]}:
        first, alone = bisect_left(ascending, k), bisect_right(ascending, capacity - k)
        num_halves = alone - half
        room_beside_halves = num_halves * capacity - (totals[alone] - totals[half])
        overflow = totals[half] - totals[first] - room_beside_halves
        best = max(best, len(ascending) - half + max(0, -(-overflow // capacity)))
    return best


class _Search:
    """Depth first, largest item first, fullest bin first, over packings into exactly `num_bins` bins.

    Bins with equal room are interchangeable, and room too small for the smallest item is waste; a branch ends when
    the waste exceeds what the totals leave over.
    """

    def __init__(self, order: Sequence[int], sizes: Sequence[int], capacity: int, num_bins: int) -> None:
        self._order, self._sizes = order, sizes
        self._smallest = min(sizes[index] for index in order)
        self._free = [capacity] * num_bins
        self._bins: list[list[int]] = [[] for _ in range(num_bins)]
        self._slack = capacity * num_bins - sum(sizes[index] for index in order)

    def run(self) -> list[list[int]] | None:
        """A packing, or None: there is none, or the limit on placements came first."""
        choices = [self._choices(0)]
        placed: list[int] = []  # the bin of every item placed
        for _ in range(_MAX_NODES):
            if not choices:
                return None
            if not choices[-1]:
                choices.pop()
                if placed:
                    self._take_back(placed.pop())
                continue
            chosen = choices[-1].pop()
            self._place(chosen, len(placed))
            placed.append(chosen)
            if len(placed) == len(self._order):
                return self._bins
            choices.append(self._choices(len(placed)))
        return None

    def _choices(self, depth: int) -> list[int]:
        """Bins worth trying for the item at `depth`, the fullest last."""
        waste = sum(left for left in self._free if left < self._smallest)
        if waste > self._slack:
            return []
        size = self._sizes[self._order[depth]]
        by_room = {left: chosen for chosen, left in enumerate(self._free) if left >= size}
        return [by_room[left] for left in sorted(by_room, reverse=True)]

    def _place(self, chosen: int, depth: int) -> None:
        index = self._order[depth]
        self._bins[chosen].append(index)
        self._free[chosen] -= self._sizes[index]

    def _take_back(self, chosen: int) -> None:
        self._free[chosen] += self._sizes[self._bins[chosen].pop()]
