"""Student's t distribution, which the standard library does not have: two-sided p-values and quantiles.

The tail probability is half the regularised incomplete beta function I_x(df/2, 1/2) at x = df / (df + t^2); its
continued fraction is evaluated by the modified Lentz method (Numerical Recipes, section 6.4).
"""

import math
from functools import lru_cache

_TINY = 1e-300
_PRECISION = 1e-15
_MAX_TERMS = 500


def two_sided_p(t: float, df: float) -> float:
    """P(|T| >= |t|) for T with `df` degrees of freedom."""
    if df <= 0:
        raise ValueError(f"degrees of freedom must be above 0, not {df}")
    if math.isinf(t):
        return 0.0
    return _incomplete_beta(df / 2.0, 0.5, df / (df + t * t), t * t / (df + t * t))


@lru_cache(maxsize=256)
def critical_value(alpha: float, df: float) -> float:
    """The t for which P(|T| >= t) is `alpha`, by bisection of `two_sided_p`."""
    if not 0.0 < alpha < 1.0:
        raise ValueError(f"alpha must lie between 0 and 1, not {alpha}")
    low, high = 0.0, 1.0
    while two_sided_p(high, df) > alpha:
        low, high = high, 2.0 * high
    while high - low > 1e-13 * high:
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if two_sided_p(middle, df) > alpha else (low, middle)
    return high


def _incomplete_beta(a: float, b: float, x: float, y: float) -> float:
    """I_x(a, b) with y = 1 - x given apart, so that neither tail loses digits."""
    if x <= 0.0 or y >= 1.0:
        return 0.0
    if y <= 0.0:
        return 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y)
    front = math.exp(log_front)
    if x < (a + 1.0) / (a + b + 2.0):
        return front * _continued_fraction(a, b, x) / a
    return 1.0 - front * _continued_fraction(b, a, y) / b


def _continued_fraction(a: float, b: float, x: float) -> float:
    c, d = 1.0, _away_from_zero(1.0 - (a + b) * x / (a + 1.0))
    d = 1.0 / d
    value = d
    for m in range(1, _MAX_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1.0) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1.0))
        for term in (even, odd):
            d = 1.0 / _away_from_zero(1.0 + term * d)
            c = _away_from_zero(1.0 + term / c)
            value *= c * d
        if abs(c * d - 1.0) < _PRECISION:
            return value
    raise ArithmeticError(f"the incomplete beta function did not converge at a={a}, b={b}, x={x}")


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
