"""What a rule is and what it finds."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from paceline.adapters.verl.launch import VerlLaunch

Severity = Literal["error", "warning", "advice"]
"""error: verl refuses it, or it computes something wrong or runs out of memory; warning: it costs speed or memory by
a known mechanism; advice: worth a try."""


@dataclass(frozen=True, slots=True)
class Hit:
    """What a rule found: the setting, what it is, what it should be, why, and the effect where one is known."""

    key: str
    current: Any
    suggested: Any
    why: str
    effect: str | None = None


class Check(Protocol):
    """A rule's function; its name reads as what must hold, and is shown in the table of rules."""

    __name__: str

    def __call__(self, launch: VerlLaunch, /) -> Iterable[Hit]: ...


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: `row` and `source` say where it comes from (docs/adapters.md lists both)."""

    id: str
    severity: Severity
    row: str
    source: str
    check: Check


@dataclass(frozen=True, slots=True)
class Finding:
    """A hit of a rule; `line` is the line of the launch in its script."""

    rule: str
    severity: Severity
    key: str
    current: Any
    suggested: Any
    why: str
    effect: str | None
    source: str
    row: str
    line: int

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def at_least(value: float, step: int = 1024) -> int:
    """`value` rounded up to a multiple of `step`."""
    return int(-(-value // step) * step)


def nearest_divisor(value: int, of: int) -> int:
    """The divisor of `of` nearest to `value`, the larger one of two as near."""
    divisors = [size for size in range(1, of + 1) if of % size == 0]
    return min(divisors, key=lambda size: (abs(size - value), -size))


GUIDE = "verl tuning guide"
ASCEND = "verl Ascend tuning guide"
LONG_RUN = "Qwen3-235B long-sequence report"
