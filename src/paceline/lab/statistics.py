"""Paired comparisons: intervals of ratios and differences, Holm's correction, and what an interval supports.

The unit of replication is a pair of runs, never a step: steps of one process share its memory layout, its neighbours
and its clock, so they are not independent. A pair's value is one number (the log ratio of the seconds of its kept
steps, or a difference), and pairs are taken as draws of one distribution (Student's t). Drift over a round changes sign
with the alternated order; it widens intervals and does not move them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from paceline.lab.results import DifferenceInterval, RatioInterval, Verdict
from paceline.lab.student_t import critical_value, two_sided_p

MIN_PAIRS = 4
"""Fewer pairs decide nothing. Noise of machines is no bell curve: on one with a fast and a slow state, three pairs of
equal runs all differ by the same step, in the same direction, in 3 % of comparisons, which no t sees through."""


RESERVE = 0.2
"""Share of alpha that no test spends. Student's t spends it exactly where noise is a bell curve; where it is not, this
is what there is to exceed it by."""


def paired_difference(
    baseline: Sequence[float], feature: Sequence[float], level: float
) -> DifferenceInterval:
    """Mean of feature - baseline over pairs, with its interval at `level`.

    Raises:
        ValueError: no pairs, or unequal numbers.
    """
    mean, low, high, _ = _t_interval([f - b for b, f in _pairs(baseline, feature)], level)
    return DifferenceInterval(mean, low, high, level)


def paired_ratio(baseline: Sequence[float], feature: Sequence[float], level: float) -> RatioInterval:
    """Geometric mean of feature / baseline over pairs, with its interval at `level` and the p-value of 1.

    Raises:
        ValueError: no pairs, unequal numbers, or a value that is not above 0.
    """
    pairs = _pairs(baseline, feature)
    if any(value <= 0 or not math.isfinite(value) for pair in pairs for value in pair):
        raise ValueError("ratios need finite values above 0")
    mean, low, high, p_value = _t_interval([math.log(f / b) for b, f in pairs], level)
    return RatioInterval(
        math.exp(mean),
        None if low is None else _exp(low),
        None if high is None else _exp(high),
        level,
        p_value,
    )


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values (Holm 1979): rejecting those at most alpha keeps the chance of any false
    rejection at most alpha, whatever the dependence between tests."""
    count = len(p_values)
    adjusted = [0.0] * count
    largest = 0.0
    for rank, index in enumerate(sorted(range(count), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (count - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def corrected_ratios(
    columns: Sequence[tuple[Sequence[float], Sequence[float]] | None], alpha: float
) -> list[RatioInterval | None]:
    """Ratios of several features to their baselines, (baseline, feature) per pair, corrected together.

    Each interval is as wide as Holm's step for it demands: level 1 - a / (m - k + 1) for the k-th smallest of m
    p-values up to the first that is not rejected, and that one's level for the rest, where a is alpha less the
    reserve. So an interval excludes 1 exactly where `adjusted_p` is at most alpha, and none is narrower than
    1 - alpha. None stays None and is not counted among the m.
    """
    spent = alpha * (1.0 - RESERVE)
    plain = [None if pair is None else paired_ratio(*pair, level=1.0 - spent) for pair in columns]
    tested = [(index, r.p_value) for index, r in enumerate(plain) if r is not None and r.p_value is not None]
    adjusted = dict(zip((i for i, _ in tested), holm([p for _, p in tested]), strict=True))
    divisor = len(tested)
    for index, p_value in sorted(tested, key=lambda item: item[1]):
        pair = columns[index]
        assert pair is not None
        wide = paired_ratio(*pair, level=1.0 - spent / divisor)
        plain[index] = replace(wide, adjusted_p=min(1.0, adjusted[index] / (1.0 - RESERVE)))
        if p_value <= spent / divisor and divisor > 1:
            divisor -= 1
    return plain


def verdict_of(step_time: RatioInterval | None, num_pairs: int, alpha: float, margin: float) -> Verdict:
    """What a corrected interval of step-time ratios supports; `margin`: the relative difference that counts as none."""
    if step_time is None or step_time.low is None or step_time.high is None or num_pairs < MIN_PAIRS:
        return "undecided"
    rejected = step_time.adjusted_p is not None and step_time.adjusted_p <= alpha
    if rejected and step_time.high < 1.0:
        return "faster"
    if rejected and step_time.low > 1.0:
        return "slower"
    if 1.0 / (1.0 + margin) <= step_time.low and step_time.high <= 1.0 + margin:
        return "no_difference"
    return "undecided"


def _pairs(baseline: Sequence[float], feature: Sequence[float]) -> list[tuple[float, float]]:
    if not baseline or len(baseline) != len(feature):
        raise ValueError(f"{len(baseline)} baseline values and {len(feature)} feature values are no pairs")
    return list(zip(baseline, feature, strict=True))


def _t_interval(
    values: Sequence[float], level: float
) -> tuple[float, float | None, float | None, float | None]:
    """Mean, low, high and the two-sided p-value of a mean of 0."""
    mean = fmean(values)
    if len(values) < 2:
        return mean, None, None, None
    df = len(values) - 1
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / df / len(values))
    if error == 0.0:
        return mean, mean, mean, 1.0 if mean == 0.0 else 0.0
    half = critical_value(1.0 - level, df) * error
    return mean, mean - half, mean + half, two_sided_p(mean / error, df)


def _exp(value: float) -> float:
    """JSON has no infinity: an interval from hardly any information ends at the largest number."""
    return math.exp(min(value, 700.0))
