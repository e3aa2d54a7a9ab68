"""How sure an accuracy is: score intervals of proportions at 95 %."""

import math

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


def wilson_interval(share: float, num_trials: int) -> tuple[float, float]:
    """Wilson's score interval (Wilson 1927) of a proportion observed as `share` of `num_trials`.

    Raises:
        ValueError: no trials, or a share outside [0, 1].
    """
    if num_trials < 1 or not 0.0 <= share <= 1.0:
        raise ValueError(f"a share of {share} in {num_trials} trials is no proportion")
    z2 = Z_95 * Z_95 / num_trials
    centre = (share + z2 / 2) / (1 + z2)
    half = Z_95 / (1 + z2) * math.sqrt(share * (1 - share) / num_trials + z2 / (4 * num_trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def difference_interval(before: float, num_before: int, after: float, num_after: int) -> tuple[float, float]:
    """Interval of `after - before`, two shares of that many trials (Newcombe 1998, method 10: Wilson bounds combined).

    The two are treated as independent; the same prompts were asked both times, so the true interval is narrower.
    """
    low_before, high_before = wilson_interval(before, num_before)
    low_after, high_after = wilson_interval(after, num_after)
    change = after - before
    return (
        change - math.hypot(after - low_after, high_before - before),
        change + math.hypot(high_after - after, before - low_before),
    )
