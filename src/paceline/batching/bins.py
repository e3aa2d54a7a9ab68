"""Bin packing: items of given sizes into as few bins of one capacity as can be found."""

from bisect import bisect_left, insort
from collections.abc import Sequence

_MAX_NODES = 20_000
"""Placements tried per number of bins: some hundredths of a second. Counted rather than timed: deterministic."""


def fewest_bins(order: Sequence[int], sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of the items in `order` (indices into `sizes`, largest first, none above `capacity`).

    Best-fit decreasing never needs more than 11/9 of the least number + 1 (Johnson 1974). Where it needs more than a lower
    bound, a bounded depth-first search tries fewer: it is exhaustive, and so the result minimal, for a few dozen items.
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
    best = -(-sum(sizes) // capacity)
    thresholds = {0, *(size for size in sizes if 2 * size <= capacity)}
    for k in thresholds:
        alone = sum(size > capacity - k for size in sizes)
        halves = [size for size in sizes if capacity - k >= size and 2 * size > capacity]
        small = sum(size for size in sizes if k <= size and 2 * size <= capacity)
        overflow = small - (len(halves) * capacity - sum(halves))
        best = max(best, alone + len(halves) + max(0, -(-overflow // capacity)))
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
                    self._take_back(placed.pop(), len(placed))
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

    def _take_back(self, chosen: int, depth: int) -> None:
        self._free[chosen] += self._sizes[self._bins[chosen].pop()]
