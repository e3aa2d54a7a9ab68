"""Numbers as people read them: units, significant digits, never a rounding that claims more than is true."""

import math

_NARROW = "\u202f"  # narrow no-break space between number and unit
UNKNOWN = "–"
_MANIFOLD = 10.0

_SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits, thousands grouped."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    if decimals > 6:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{decimals}f}"


def seconds(value: float | None) -> str:
    """A duration: 38 µs, 412 ms, 6.21 s, 4 min 12 s, 2 h 05 min."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return f"0{_NARROW}s"
    if value < 1e-3:
        return f"{value * 1e6:.0f}{_NARROW}µs"
    if value < 0.9995:
        return f"{number(value * 1e3)}{_NARROW}ms"
    if value < 119.5:
        return f"{number(value)}{_NARROW}s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes}{_NARROW}min {rest:02d}{_NARROW}s"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours}{_NARROW}h {minutes:02d}{_NARROW}min"


_TIME_UNITS = ((300.0, 1.0, "seconds"), (7200.0, 60.0, "minutes"), (math.inf, 3600.0, "hours"))


def time_unit(total_s: float) -> tuple[float, str]:
    """Seconds per unit, and the unit's name, for an axis over so many seconds."""
    return next((scale, unit) for limit, scale, unit in _TIME_UNITS if total_s < limit)


def share(value: float | None, decimals: int = 1) -> str:
    """A share in percent. What is not all is never shown as 100 %, and what is not nothing never as 0 %."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    percent = value * 100
    text = f"{percent:.{decimals}f}"
    if percent > 0 and float(text) == 0:
        return f"<{_NARROW}{10**-decimals:.{decimals}f}{_NARROW}%"
    if 100 - percent > 0 and float(text) == 100:
        return (
            f"{math.floor(percent * 100 + 1e-6) / 100:.2f}{_NARROW}%"
            if percent < 99.99
            else f">{_NARROW}99.99{_NARROW}%"
        )
    if float(text) == 100:
        return f"100{_NARROW}%"
    return f"{text}{_NARROW}%"


def change(before: float, after: float, decimals: int = 1) -> str:
    """What came of a value above 0: +12.3 %, or from tenfold on how many times it is."""
    ratio = after / before
    if ratio >= _MANIFOLD:
        return f"×{_NARROW}{number(ratio)}"
    text = f"{(ratio - 1) * 100:+.{decimals}f}"
    if float(text) == 0.0:
        return f"0{_NARROW}%"
    return f"{text}{_NARROW}%".replace("-", "−")


def points(low: float, high: float) -> str:
    """An interval of shares in percent."""
    return f"{low * 100:.0f}–{high * 100:.0f}{_NARROW}%"


def quantity(value: float | None, unit: str = "") -> str:
    """A count or rate with an SI prefix from ten thousand on: 1,234 · 12.3 M · 4.5 TFLOP."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    scale, prefix = next(((s, p) for s, p in _SI if abs(value) >= s), (1.0, ""))
    if abs(value) < 1e4:
        scale, prefix = 1.0, ""
    return f"{number(value / scale)}{_NARROW if prefix or unit else ''}{prefix}{unit}"


def count(value: float) -> str:
    """A mean count: whole numbers up to a million, then with a prefix."""
    return f"{value:,.0f}" if abs(value) < 1e6 else quantity(value)


def memory(num_bytes: float | None) -> str:
    """Bytes in binary units."""
    if num_bytes is None or not math.isfinite(num_bytes):
        return UNKNOWN
    scale, unit = next(((s, u) for s, u in _BINARY if num_bytes >= s), (1, "B"))
    return f"{number(num_bytes / scale)}{_NARROW}{unit}"
