"""When each stage owned the time: the ledger's spans of one section as a partition of it. Torch-free.

Exact in nanoseconds: what a stage gets here is its self-time in the ledger, and all of it adds up to the section.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from paceline.telemetry.causes.cells import Intervals, no_intervals
from paceline.telemetry.causes.records import UNACCOUNTED
from paceline.telemetry.sections import ClosedSpan
from paceline.types import Cause


@dataclass(frozen=True, slots=True)
class SelfTime:
    """A stretch in which one span was the innermost. `cause` is what the span says it waits for, if it does."""

    stage: str
    cause: Cause | None
    start_ns: int
    end_ns: int


def self_times(spans: Iterable[ClosedSpan], start_ns: int, end_ns: int) -> list[SelfTime]:
    """The section [start_ns, end_ns] in stretches, in order of time; time in no span is of stage `unaccounted`.

    `spans` are all closed spans of the section, nested as a stack nests them.
    """
    found: list[SelfTime] = []
    stack: list[ClosedSpan] = []
    now = start_ns

    def give(until: int) -> None:
        nonlocal now
        if until > now:
            stage, cause = (stack[-1].stage, stack[-1].cause) if stack else (UNACCOUNTED, None)
            found.append(SelfTime(stage, cause, now, until))
            now = until

    def close(until: int) -> None:
        while stack and stack[-1].end_ns <= until:
            give(stack[-1].end_ns)
            stack.pop()

    for span in sorted(spans, key=lambda one: (one.start_ns, one.depth)):
        close(span.start_ns)
        give(span.start_ns)
        stack.append(span)
    close(end_ns)
    give(end_ns)
    return found


def by_stage(stretches: Iterable[SelfTime], origin_ns: int) -> dict[str, Intervals]:
    """Intervals of each stage, in seconds since `origin_ns`."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for one in stretches:
        pairs.setdefault(one.stage, []).append(_seconds(one, origin_ns))
    return {stage: np.array(found) for stage, found in pairs.items()}


def of_cause(stretches: Iterable[SelfTime], cause: Cause, origin_ns: int) -> Intervals:
    """Intervals whose span says that it waits for `cause`, in seconds since `origin_ns`."""
    found = [_seconds(one, origin_ns) for one in stretches if one.cause == cause]
    return np.array(found) if found else no_intervals()


def _seconds(one: SelfTime, origin_ns: int) -> tuple[float, float]:
    return (one.start_ns - origin_ns) / 1e9, (one.end_ns - origin_ns) / 1e9
