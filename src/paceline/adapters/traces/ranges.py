"""Nested named ranges of one lane (a thread, a rank) to self-times: the innermost owns the time, as in the ledger."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.adapters.run.writing import section_line, span_line
from paceline.telemetry.causes.cells import Intervals, no_intervals
from paceline.telemetry.records import SectionRecord, SpanRecord, StageRecord


@dataclass(frozen=True, slots=True)
class Range:
    """A named stretch that belongs to a stage, in seconds."""

    stage: str
    name: str
    start: float
    end: float


@dataclass(slots=True)
class Laid:
    """Ranges of one section: when each stage owned the time, and a span for each range."""

    segments: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    spans: list[tuple[Range, int, float]] = field(default_factory=list)
    """Range, depth, self-time."""

    def intervals(self, stage: str) -> Intervals:
        """The stage's own time."""
        found = self.segments.get(stage, [])
        return np.array(found, dtype=float) if found else no_intervals()

    def seconds(self, stage: str) -> float:
        """Length of the stage's own time."""
        return sum(end - start for start, end in self.segments.get(stage, []))


@dataclass(slots=True)
class _Open:
    range: Range
    self_s: float = 0.0


def lay_out(ranges: Iterable[Range], start: float, end: float) -> Laid:
    """Cuts ranges to the section [start, end] and gives every instant to the innermost range that is open.

    Of ranges that overlap without nesting the earlier one ends where the later begins.
    """
    layer = _Layer(start)
    for one in sorted(ranges, key=lambda r: (r.start, -r.end)):
        begins, ends = max(one.start, start), min(one.end, end)
        if ends > begins:
            layer.open(Range(one.stage, one.name, begins, ends))
    layer.close_until(end)
    return layer.laid


class _Layer:
    """A stack of open ranges; time up to `now` is given."""

    def __init__(self, start: float) -> None:
        self.laid = Laid()
        self.now = start
        self.stack: list[_Open] = []

    def open(self, one: Range) -> None:
        self.close_until(one.start)
        while self.stack and self.stack[-1].range.end < one.end:
            self._close(one.start)
        if self.stack:
            self._give(self.stack[-1], one.start)
        self.now = one.start
        self.stack.append(_Open(one))

    def close_until(self, time: float) -> None:
        while self.stack and self.stack[-1].range.end <= time:
            self._close(self.stack[-1].range.end)

    def _close(self, end: float) -> None:
        innermost = self.stack.pop()
        self._give(innermost, end)
        self.now = max(self.now, end)
        whole = innermost.range
        cut = Range(whole.stage, whole.name, whole.start, end)
        self.laid.spans.append((cut, len(self.stack), innermost.self_s))

    def _give(self, entry: _Open, until: float) -> None:
        if until > self.now:
            self.laid.segments.setdefault(entry.range.stage, []).append((self.now, until))
            entry.self_s += until - self.now


def section_lines(
    laid: Laid, step: int | None, start: float, end: float, origin: float
) -> list[dict[str, Any]]:
    """The ledger's lines of a section: its spans, then the section itself."""
    spans = [
        span_line(SpanRecord(step, one.stage, one.name, depth, one.start - origin, one.end - origin, self_s))
        for one, depth, self_s in sorted(laid.spans, key=lambda entry: entry[0].start)
    ]
    counts = Counter(one.stage for one, _, _ in laid.spans)
    stages = {
        stage: StageRecord(laid.seconds(stage), counts[stage], 0, 0.0, 0, 0, 0, 0) for stage in laid.segments
    }
    covered = math.fsum(stage.self_s for stage in stages.values())
    section = SectionRecord(
        step=step,
        start_s=start - origin,
        end_s=end - origin,
        wall_s=end - start,
        unaccounted_s=max(0.0, end - start - covered),
        num_spans=len(spans),
        num_spans_not_kept=0,
        stages=stages,
    )
    return [*spans, section_line(section)]
