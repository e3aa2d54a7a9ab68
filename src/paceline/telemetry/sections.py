"""What a ledger adds up between two cuts of the run: sums by stage, memory, spans kept for the timeline. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.types import Cause

RECORD_VERSION = 1

NEW_SHAPE = ", new shape"
"""Ends the name of a span of a pass whose micro-batch has a shape that the process had not met before."""

MAX_SPANS_PER_LEVEL = 10_000
"""Spans kept per section with nothing around them; as many with one span around them, and with more than one."""

MAX_SPANS_PER_NAME = 2_000
"""Of spans that lie inside others, those of one stage and name that are kept per section."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Peak device memory since the last sample and resident host memory now, in bytes; 0 is what was not looked at."""

    peak_allocated: int = 0
    peak_reserved: int = 0
    host_rss: int = 0


@dataclass(slots=True)
class MemoryPeaks:
    """The largest values seen, in bytes."""

    peak_allocated: int = 0
    peak_reserved: int = 0
    host_rss: int = 0

    def take(self, sample: MemorySample) -> None:
        """Raises the peaks to those of `sample`."""
        self.peak_allocated = max(self.peak_allocated, sample.peak_allocated)
        self.peak_reserved = max(self.peak_reserved, sample.peak_reserved)
        self.host_rss = max(self.host_rss, sample.host_rss)

    def record(self) -> dict[str, int]:
        """The fields as written."""
        return {
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "host_rss": self.host_rss,
        }


class ClosedSpan(Protocol):
    """What is read of a span once it is closed; times in the ledger's nanoseconds."""

    @property
    def stage(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def cause(self) -> Cause | None: ...
    @property
    def depth(self) -> int: ...
    @property
    def start_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...
    @property
    def children_ns(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def flops(self) -> float: ...
    @property
    def num_bytes(self) -> int: ...


@dataclass(slots=True)
class StageTotals:
    """Sums of one stage in one section."""

    self_ns: int = 0
    count: int = 0
    tokens: int = 0
    flops: float = 0.0
    num_bytes: int = 0
    memory: MemoryPeaks = field(default_factory=MemoryPeaks)
    cause_ns: dict[Cause, int] = field(default_factory=dict)
    """Of `self_ns`, what spans that name a cause own."""

    def record(self) -> dict[str, Any]:
        """The fields as written."""
        record: dict[str, Any] = {
            "self_s": self.self_ns / 1e9,
            "count": self.count,
            "tokens": self.tokens,
            "flops": self.flops,
            "bytes": self.num_bytes,
            **self.memory.record(),
        }
        if self.cause_ns:
            record["cause_s"] = {cause: self_ns / 1e9 for cause, self_ns in self.cause_ns.items()}
        return record


@dataclass(frozen=True, slots=True)
class SectionTotals:
    """A finished section. In whole nanoseconds, `wall_ns` is the sum of `stage_ns` and `unaccounted_ns`, exactly.

    `memory` covers all of it, time outside spans included; host memory as of the last look in it.
    """

    step: int | None
    wall_ns: int
    unaccounted_ns: int
    stage_ns: Mapping[str, int]
    stage_tokens: Mapping[str, int]
    stage_flops: Mapping[str, float]
    memory: MemorySample
    start_ns: int = 0
    """Begin in the ledger's clock."""

    @property
    def wall_s(self) -> float:
        """Wall time in seconds."""
        return self.wall_ns / 1e9

    @property
    def unaccounted_s(self) -> float:
        """Seconds that no span covers."""
        return self.unaccounted_ns / 1e9

    @property
    def stage_s(self) -> dict[str, float]:
        """Self-seconds by stage."""
        return {stage: self_ns / 1e9 for stage, self_ns in self.stage_ns.items()}


class Section:
    """The section under way; `step` is None outside steps."""

    __slots__ = (
        "_by_level",
        "_by_name",
        "_covered_ns",
        "_num_spans",
        "_spans",
        "_stages",
        "closed",
        "memory",
        "start_ns",
        "step",
        "watch",
    )

    def __init__(self, step: int | None, start_ns: int, watch: list[ClosedSpan] | None = None) -> None:
        self.step, self.start_ns, self.watch = step, start_ns, watch
        self.closed: list[ClosedSpan] = []
        """Spans closed and not yet added up: that waits for `fold`, so that closing one costs little."""
        self.memory = MemoryPeaks()
        self._covered_ns = self._num_spans = 0
        self._stages: dict[str, StageTotals] = {}
        self._spans: list[ClosedSpan] = []
        self._by_level = [0, 0, 0]
        self._by_name: dict[tuple[str, str], int] = {}

    def take_memory(self, stage: str | None, sample: MemorySample) -> None:
        """Files a sample under the section, and under the stage whose time it covers (None: no span's)."""
        self.memory.take(sample)
        if stage is not None:
            self._totals_of(stage).memory.take(sample)

    def fold(self) -> None:
        """Adds closed spans to the sums, and keeps those for the timeline of which there are not too many."""
        if self.watch is not None:
            self.watch.extend(self.closed)
        for span in self.closed:
            duration_ns = span.end_ns - span.start_ns
            totals = self._totals_of(span.stage)
            totals.self_ns += duration_ns - span.children_ns
            totals.count += 1
            totals.tokens += span.tokens
            totals.flops += span.flops
            totals.num_bytes += span.num_bytes
            if span.cause is not None:
                own_ns = duration_ns - span.children_ns
                totals.cause_ns[span.cause] = totals.cause_ns.get(span.cause, 0) + own_ns
            if span.depth == 0:
                self._covered_ns += duration_ns
            if self._has_room(span):
                self._spans.append(span)
        self._num_spans += len(self.closed)
        self.closed.clear()

    def _has_room(self, span: ClosedSpan) -> bool:
        level = min(span.depth, 2)
        if self._by_level[level] == MAX_SPANS_PER_LEVEL:
            return False
        if level:
            key = (span.stage, span.name)
            count = self._by_name.get(key, 0)
            if count == MAX_SPANS_PER_NAME:
                return False
            self._by_name[key] = count + 1
        self._by_level[level] += 1
        return True

    def _totals_of(self, stage: str) -> StageTotals:
        totals = self._stages.get(stage)
        if totals is None:
            totals = self._stages[stage] = StageTotals()
        return totals

    def totals(self, end_ns: int) -> SectionTotals:
        """What the section came to if it ends at `end_ns`."""
        self.fold()
        wall_ns = end_ns - self.start_ns
        stages = self._stages.items()
        return SectionTotals(
            step=self.step,
            wall_ns=wall_ns,
            unaccounted_ns=wall_ns - self._covered_ns,
            stage_ns={stage: totals.self_ns for stage, totals in stages},
            stage_tokens={stage: totals.tokens for stage, totals in stages},
            stage_flops={stage: totals.flops for stage, totals in stages},
            memory=MemorySample(**self.memory.record()),
            start_ns=self.start_ns,
        )

    def records(self, end_ns: int, origin_ns: int) -> list[dict[str, Any]]:
        """Its lines: the spans kept, then the section itself. Times become seconds since `origin_ns`."""
        self.fold()
        wall_ns = end_ns - self.start_ns
        section = {
            "v": RECORD_VERSION,
            "kind": "section",
            "step": self.step,
            "start_s": (self.start_ns - origin_ns) / 1e9,
            "end_s": (end_ns - origin_ns) / 1e9,
            "wall_s": wall_ns / 1e9,
            "unaccounted_s": (wall_ns - self._covered_ns) / 1e9,
            "num_spans": self._num_spans,
            "num_spans_not_kept": self._num_spans - len(self._spans),
            **self.memory.record(),
            "stages": {stage: totals.record() for stage, totals in self._stages.items()},
        }
        return [*(_span_record(span, self.step, origin_ns) for span in self._spans), section]


def _span_record(span: ClosedSpan, step: int | None, origin_ns: int) -> dict[str, Any]:
    record = {
        "v": RECORD_VERSION,
        "kind": "span",
        "step": step,
        "stage": span.stage,
        "name": span.name,
        "depth": span.depth,
        "start_s": (span.start_ns - origin_ns) / 1e9,
        "end_s": (span.end_ns - origin_ns) / 1e9,
        "self_s": (span.end_ns - span.start_ns - span.children_ns) / 1e9,
    }
    if span.cause is not None:
        record["cause"] = span.cause
    if span.tokens:
        record["tokens"] = span.tokens
    if span.flops:
        record["flops"] = span.flops
    if span.num_bytes:
        record["bytes"] = span.num_bytes
    return record
