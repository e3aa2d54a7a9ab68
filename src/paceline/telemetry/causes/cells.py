"""Time divided into the six causes by what ran when. The cells of a window add up to it.

At every instant one cause owns the time, the first of: compute (a compute kernel runs), memory (a memory kernel runs,
no compute kernel), communication (nothing but communication runs: it is exposed), and while the device is idle: data
(the host waits for input), queue (it waits for another stage), scheduling (it prepares work).
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from paceline.types import CAUSES, Cause

Intervals = NDArray[np.float64]
"""Shape (N, 2): begin and end, in seconds."""

Cells = dict[Cause, float]
"""Seconds by cause."""

_PRIORITY: tuple[Cause, ...] = ("compute", "memory", "communication", "data", "queue")
"""The rest is scheduling."""


def no_intervals() -> Intervals:
    """None at all."""
    return np.empty((0, 2))


@dataclass(slots=True)
class Activity:
    """When what ran, on the device (or in operators of a CPU) and, for `data` and `queue`, on the host."""

    compute: Intervals = field(default_factory=no_intervals)
    memory: Intervals = field(default_factory=no_intervals)
    communication: Intervals = field(default_factory=no_intervals)
    data: Intervals = field(default_factory=no_intervals)
    queue: Intervals = field(default_factory=no_intervals)

    def of(self, cause: Cause) -> Intervals:
        """The intervals of one cause; `scheduling` has none of its own."""
        by_cause = {
            "compute": self.compute,
            "memory": self.memory,
            "communication": self.communication,
            "data": self.data,
            "queue": self.queue,
        }
        return by_cause.get(cause, no_intervals())


def disjoint(intervals: Intervals) -> Intervals:
    """The union as disjoint intervals in order; overlapping and touching ones become one."""
    if len(intervals) == 0:
        return no_intervals()
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ordered[:, 1])
    begins_new = np.concatenate(([True], ordered[1:, 0] > reach[:-1]))
    starts = ordered[begins_new, 0]
    ends = reach[np.concatenate((begins_new[1:], [True]))]
    return np.stack((starts, ends), axis=1)


def covered(union: Intervals, windows: Intervals) -> float:
    """Seconds of `windows` (disjoint) that lie in `union` (disjoint, in order)."""
    if len(union) == 0 or len(windows) == 0:
        return 0.0
    # the length of the union up to t is piecewise linear in t: it rises by 1 inside an interval and is flat between
    times = union.ravel()
    lengths = np.zeros(len(times))
    sums = np.cumsum(union[:, 1] - union[:, 0])
    lengths[1::2] = sums
    lengths[2::2] = sums[:-1]
    return float(np.sum(np.interp(windows[:, 1], times, lengths) - np.interp(windows[:, 0], times, lengths)))


class Timeline:
    """Activity made ready to divide many windows: the nested unions of the causes are built once."""

    def __init__(self, activity: Activity) -> None:
        self._unions: list[tuple[Cause, Intervals]] = []
        union = no_intervals()
        for cause in _PRIORITY:
            union = disjoint(np.concatenate((union, activity.of(cause))))
            self._unions.append((cause, union))

    def split(self, windows: Intervals) -> Cells:
        """Seconds of the windows by cause. They add up to the windows' length."""
        windows = disjoint(windows)
        cells: Cells = dict.fromkeys(CAUSES, 0.0)
        before = 0.0
        for cause, union in self._unions:
            now = covered(union, windows)
            cells[cause] = max(0.0, now - before)
            before = max(before, now)
        length = float(np.sum(windows[:, 1] - windows[:, 0]))
        cells["scheduling"] = max(0.0, length - before)
        return cells


def split(windows: Intervals, activity: Activity) -> Cells:
    """Seconds of the windows by cause. They add up to the windows' length."""
    return Timeline(activity).split(windows)
