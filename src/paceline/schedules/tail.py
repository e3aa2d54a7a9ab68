"""The end of a rollout, where few samples are left and most of a device waits for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

TAIL_SHARE = 0.05
"""The last samples are so large a share of all, at least one."""


@dataclass(frozen=True, slots=True)
class TailFigures:
    """Seconds from a rollout's begin until half, 90 % and 99 % of the samples had finished, and until all had; how long
    the last `num_last` samples ran alone, and the device-seconds that were idle in that time: the share of the slots
    that nobody used, times the time."""

    p50_s: float
    p90_s: float
    p99_s: float
    last_s: float
    num_last: int
    tail_s: float
    idle_s: float


def tail_figures(finish_s: Sequence[float], max_running: int) -> TailFigures | None:
    """Figures of one device's rollout, from the seconds after which each of its samples finished; None without any.

    Slots are those that could have been in use: at most `max_running`, and no more than there were samples.
    """
    if not finish_s:
        return None
    times = np.sort(np.asarray(finish_s, dtype=np.float64))
    num_samples = len(times)
    num_slots = min(max_running, num_samples)
    num_last = min(num_slots, max(1, int(num_samples * TAIL_SHARE)))
    # the tail begins when the sample before the last ones finishes, or with the rollout where there is none
    begin = float(times[-num_last - 1]) if num_last < num_samples else 0.0
    bounds = np.concatenate([[begin], times[-num_last:]])
    running = np.arange(num_last, 0, -1)
    idle_s = float((np.diff(bounds) * (1.0 - running / num_slots)).sum())
    # the smallest time by which that share had finished: a sample's own time, never one between two
    quantiles = np.quantile(times, (0.5, 0.9, 0.99), method="inverted_cdf")
    p50_s, p90_s, p99_s = (float(value) for value in quantiles)
    last_s = float(times[-1])
    return TailFigures(p50_s, p90_s, p99_s, last_s, num_last, last_s - begin, idle_s)
