"""Means with intervals, robust trends and the line through micro-batches' times: the statistics of a diagnosis."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""

MAX_TREND_POINTS = 1000
"""A trend over more steps is taken over so many of them, evenly spaced: it looks at all pairs."""


_MAX_GROUPS = 8
_MIN_PASSES = 8
_MIN_SPREAD = 0.25
"""Sizes that differ less than this share of their mean do not tell what a micro-batch costs whatever its size."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its 95 % interval; the interval is the value itself where a single observation gives none."""

    value: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Estimate":
        """The same times a factor of at least 0."""
        return Estimate(self.value * factor, self.low * factor, self.high * factor)


def t_quantile(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t, by Cornish and Fisher's expansion; exact for 1 and 2 degrees.

    Source: Abramowitz and Stegun 26.7.5. Within 1 % from 3 degrees on.

    Raises:
        ValueError: no degree of freedom.
    """
    if degrees < 1:
        raise ValueError("Student's t needs a degree of freedom")
    if degrees == 1:
        return 12.706204736174698
    if degrees == 2:
        return 4.302652729749464
    z, n = Z_95, float(degrees)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / n ** (power + 1) for power, term in enumerate(terms))


def mean_of(values: Iterable[float]) -> Estimate:
    """Mean with Student's interval; 0 for no values at all."""
    found = list(values)
    if not found:
        return Estimate(0.0, 0.0, 0.0)
    mean = math.fsum(found) / len(found)
    if len(found) == 1:
        return Estimate(mean, mean, mean)
    variance = math.fsum((value - mean) ** 2 for value in found) / (len(found) - 1)
    half = t_quantile(len(found) - 1) * math.sqrt(variance / len(found))
    return Estimate(mean, mean - half, mean + half)


def cost_of(values: Iterable[float]) -> Estimate:
    """`mean_of` seconds that cannot be negative: the interval stops at 0."""
    estimate = mean_of(values)
    return Estimate(max(0.0, estimate.value), max(0.0, estimate.low), max(0.0, estimate.high))


def trend(steps: Sequence[int], values: Sequence[float]) -> Estimate | None:
    """Slope per step by Theil (1950) and Sen (1968): the median of all pairs' slopes, with Sen's 95 % interval from
    the variance of Kendall's score. A few odd steps do not move it. None below four steps."""
    if len(values) < 4:
        return None
    keep = np.unique(np.linspace(0, len(values) - 1, min(len(values), MAX_TREND_POINTS)).astype(int))
    x, y = np.asarray(steps, float)[keep], np.asarray(values, float)[keep]
    first, second = np.triu_indices(len(x), 1)
    slopes = np.sort((y[second] - y[first]) / (x[second] - x[first]))
    n = len(x)
    spread = Z_95 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = max(0, round((len(slopes) - spread) / 2))
    high = min(len(slopes) - 1, round((len(slopes) + spread) / 2))
    return Estimate(float(np.median(slopes)), float(slopes[low]), float(slopes[high]))


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds of a micro-batch as `fixed_s` + `per_slot_s` x token slots; both at least 0. `fixed_error_s` is the
    standard error of `fixed_s`. `is_separable`: sizes differed enough to tell the two apart."""

    fixed_s: float
    per_slot_s: float
    fixed_error_s: float
    is_separable: bool

    def at(self, slots: NDArray[np.float64]) -> NDArray[np.float64]:
        """Expected seconds of micro-batches of these sizes."""
        return self.fixed_s + self.per_slot_s * slots


def fit_passes(slots: Sequence[float], seconds: Sequence[float]) -> PassTimes | None:
    """A line through micro-batches' times; neither part may be negative. None without any micro-batch.

    It goes through the medians of up to eight groups of like size, because what else a machine does only ever adds.
    """
    if not slots:
        return None
    order = np.argsort(np.asarray(slots, float), kind="stable")
    x, y = np.asarray(slots, float)[order], np.asarray(seconds, float)[order]
    groups = np.array_split(np.arange(len(x)), min(_MAX_GROUPS, len(x)))
    mean_x = np.array([x[group].mean() for group in groups])
    median_y = np.array([np.median(y[group]) for group in groups])
    spread = float(np.sum((mean_x - mean_x.mean()) ** 2))
    if len(x) < _MIN_PASSES or np.ptp(mean_x) <= _MIN_SPREAD * mean_x.mean():
        return PassTimes(0.0, float(y.sum() / max(x.sum(), 1.0)), 0.0, False)
    slope = float(np.sum((mean_x - mean_x.mean()) * (median_y - median_y.mean()))) / spread
    fixed = float(median_y.mean() - slope * mean_x.mean())
    left = median_y - fixed - slope * mean_x
    variance = float(np.sum(left**2)) / max(1, len(groups) - 2)
    error = math.sqrt(variance * (1 / len(groups) + mean_x.mean() ** 2 / spread))
    if slope < 0.0:
        slope, fixed = 0.0, float(median_y.mean())
    elif fixed < 0.0:
        slope, fixed = float(np.sum(mean_x * median_y) / np.sum(mean_x**2)), 0.0
    return PassTimes(fixed, slope, error, True)
