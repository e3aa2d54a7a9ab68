"""Evens out the costs of given parts by moving and swapping single items; shared by micro-batches and ranks."""

import heapq
import math
from collections.abc import Sequence

_MAX_TRIALS = 200_000
_MAX_EXCHANGES_PER_PART = 8
"""Bounds on the exchanges tried and made: some tenths of a second. Counts, not times: plans are deterministic."""
_GOOD_ENOUGH = 1.001
"""Heaviest part over the mean at which to stop; the rest of a per mille is less than a plan's own error."""


def lightest_first(
    order: Sequence[int],
    costs: Sequence[float],
    num_parts: int,
    *,
    sizes: Sequence[int] | None = None,
    capacity: int | None = None,
    max_items: int | None = None,
) -> list[list[int]] | None:
    """Each item of `order` into the cheapest part that has room for it (Graham 1969 when costs descend).

    Room means a total of `sizes` up to `capacity` and up to `max_items` items. None if an item fits nowhere.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    used = [0] * num_parts
    heap = [(0.0, part) for part in range(num_parts)]
    for index in order:
        passed_over = []
        while heap:
            spent, part = heapq.heappop(heap)
            fits = sizes is None or capacity is None or used[part] + sizes[index] <= capacity
            if fits and (max_items is None or len(parts[part]) < max_items):
                break
            passed_over.append((spent, part))
        else:
            return None
        parts[part].append(index)
        used[part] += sizes[index] if sizes is not None else 0
        heapq.heappush(heap, (spent + costs[index], part))
        for entry in passed_over:
            heapq.heappush(heap, entry)
    return parts


def rebalance(
    parts: Sequence[Sequence[int]],
    costs: Sequence[float],
    *,
    sizes: Sequence[int] | None = None,
    capacity: int | None = None,
    only_swaps: bool = False,
) -> list[list[int]]:
    """Lowers the cost of the heaviest part until no single move or swap does or the parts are even, within `capacity`.

    `only_swaps` keeps the number of items of every part. No part is emptied: moving an only item evens nothing out.
    Deterministic.
    """
    found = [list(part) for part in parts]
    spent = [math.fsum(costs[index] for index in part) for part in found]
    sizes = sizes or [0] * len(costs)
    used = [sum(sizes[index] for index in part) for part in found]
    room = math.inf if capacity is None else capacity
    even = math.fsum(spent) / max(1, len(found)) * _GOOD_ENOUGH
    trials = 0
    for _ in range(_MAX_EXCHANGES_PER_PART * len(found)):
        heavy = max(range(len(found)), key=lambda part: (spent[part], -part))
        if spent[heavy] <= even or trials >= _MAX_TRIALS:
            break
        for light in sorted(range(len(found)), key=lambda part: (spent[part], part)):
            if light == heavy:
                continue
            trials += len(found[heavy]) * (len(found[light]) + 1)
            exchange = _best_exchange(
                found[heavy],
                found[light],
                costs,
                sizes,
                gap=spent[heavy] - spent[light],
                room_heavy=room - used[heavy],
                room_light=room - used[light],
                only_swaps=only_swaps,
            )
            if exchange is not None:
                break
        else:
            return found
        given, taken = exchange
        _apply(found[heavy], found[light], given, taken)
        for part in (heavy, light):
            spent[part] = math.fsum(costs[index] for index in found[part])
            used[part] = sum(sizes[index] for index in found[part])
    return found


def _best_exchange(
    heavy: Sequence[int],
    light: Sequence[int],
    costs: Sequence[float],
    sizes: Sequence[int],
    *,
    gap: float,
    room_heavy: float,
    room_light: float,
    only_swaps: bool,
) -> tuple[int, int | None] | None:
    """The item to give to the light part, and the one to take for it, that leave the two parts closest together.

    Shifting a cost d with 0 < d < gap leaves both below the heavy one; d = gap / 2 evens them out.
    """
    best: tuple[int, int | None] | None = None
    best_distance = gap / 2 * (1 - 1e-9)  # progress below rounding is none, and could go on for ever
    takings: list[int | None] = list(light)
    if not only_swaps:
        takings.insert(0, None)
    for given in heavy:
        for taken in takings:
            shifted = costs[given] - (0.0 if taken is None else costs[taken])
            distance = abs(shifted - gap / 2)
            if distance >= best_distance:
                continue
            growth = sizes[given] - (0 if taken is None else sizes[taken])
            if growth <= room_light and -growth <= room_heavy:
                best, best_distance = (given, taken), distance
    return best


def _apply(heavy: list[int], light: list[int], given: int, taken: int | None) -> None:
    heavy.remove(given)
    light.append(given)
    if taken is not None:
        light.remove(taken)
        heavy.append(taken)
