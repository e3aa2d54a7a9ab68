"""The ledger: every nanosecond of a rank belongs to the innermost open span, or is shown as unaccounted.

A stack of spans partitions the wall clock: when a span opens, the one below stops collecting self-time until it
closes. Sections cut the run: a *step* section per step and, between them, *outside* sections (set-up, evaluation before
the first step, the final save). In every section

    wall = sum of the self-times of its spans + unaccounted        (exactly, in integer nanoseconds)

The ledger belongs to the thread that made it; background work is noted with `background` and owns no wall time.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from paceline.types import Cause, Stage

RECORD_VERSION = 1

LedgerStage = Stage | str
"""A stage of a step, or `setup` for work outside steps."""

_MAX_SPAN_RECORDS = 2000
"""Span records kept per section for the timeline; later ones still count in the stages' sums."""


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Peak device memory since the last sample and resident host memory now, in bytes."""

    peak_allocated: int = 0
    peak_reserved: int = 0
    host_rss: int = 0


MemorySampler = Callable[[], MemorySample]


@dataclass(slots=True)
class _StageTotals:
    self_ns: int = 0
    count: int = 0
    tokens: int = 0
    flops: float = 0.0
    num_bytes: int = 0
    memory: MemorySample = field(default_factory=MemorySample)

    def record(self) -> dict[str, Any]:
        return {
            "self_s": self.self_ns / 1e9,
            "count": self.count,
            "tokens": self.tokens,
            "flops": self.flops,
            "bytes": self.num_bytes,
            "peak_allocated": self.memory.peak_allocated,
            "peak_reserved": self.memory.peak_reserved,
            "host_rss": self.memory.host_rss,
        }


class Span:
    """An open piece of work; use as a context manager, `add` what it did while it is open."""

    __slots__ = (
        "_ledger",
        "absorb",
        "cause",
        "children_ns",
        "depth",
        "flops",
        "name",
        "num_bytes",
        "stage",
        "start_ns",
        "tokens",
    )

    def __init__(
        self, ledger: "Ledger", stage: LedgerStage, name: str, cause: Cause | None, absorb: bool
    ) -> None:
        self._ledger, self.stage, self.name, self.cause, self.absorb = ledger, stage, name, cause, absorb
        self.tokens, self.flops, self.num_bytes = 0, 0.0, 0
        self.start_ns = self.children_ns = self.depth = 0

    def add(self, *, tokens: int = 0, flops: float = 0.0, num_bytes: int = 0) -> None:
        """Counts work done inside the span."""
        self.tokens += tokens
        self.flops += flops
        self.num_bytes += num_bytes

    def __enter__(self) -> Self:
        self._ledger._open(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ledger._close(self)


@dataclass(slots=True)
class _Section:
    """Time between two cuts of the run; `step` is None outside steps."""

    step: int | None
    start_ns: int
    covered_ns: int = 0
    stages: dict[str, _StageTotals] = field(default_factory=dict)
    spans: list[dict[str, Any]] = field(default_factory=list)
    num_spans: int = 0


@dataclass(frozen=True, slots=True)
class SectionTotals:
    """A finished section: wall seconds, self-seconds by stage and what no span covered."""

    step: int | None
    wall_s: float
    stage_s: dict[str, float]
    stage_tokens: dict[str, int]
    stage_flops: dict[str, float]
    unaccounted_s: float


class Ledger:
    """One rank's stack of spans, appended to `path` section by section (None: kept in memory only)."""

    def __init__(
        self,
        path: Path | None = None,
        rank: int = 0,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        sample_memory: MemorySampler | None = None,
    ) -> None:
        self._clock_ns, self._rank, self._sample_memory = clock_ns, rank, sample_memory
        self._stack: list[Span] = []
        self._background: list[dict[str, Any]] = []
        self._background_lock = threading.Lock()
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
            self._file = path.open("a", encoding="utf-8")
            if torn:  # a killed process's half line must not swallow the next record
                self._file.write("\n")
        self._origin_ns = clock_ns()
        self._section = _Section(None, self._origin_ns)
        self.last_section: SectionTotals | None = None
        self._write({"kind": "run", "unix_s": time.time(), "rank": rank})

    def span(
        self, stage: LedgerStage, name: str = "", *, cause: Cause | None = None, absorb: bool = False
    ) -> Span:
        """A span of `stage`. With `absorb`, spans opened inside it count for this stage too, under their own names.

        An evaluation generates and scores like a step does; absorbed, its seconds are the evaluation's.
        """
        outer = self._stack[-1] if self._stack else None
        if outer is not None and outer.absorb:
            return Span(self, outer.stage, f"{stage} {name}".strip(), cause, True)
        return Span(self, stage, name, cause, absorb)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """A step's section. Opens between spans only.

        Raises:
            RuntimeError: a span is still open; its time would belong to two sections.
        """
        self._cut(step)
        try:
            yield
        finally:
            self._cut(None)

    def background(self, stage: LedgerStage, name: str, start_ns: int, end_ns: int) -> None:
        """Notes work of another thread, in this ledger's clock; it owns no wall time. May be called from any thread."""
        record = {
            "kind": "background",
            "stage": stage,
            "name": name,
            "start_s": (start_ns - self._origin_ns) / 1e9,
            "end_s": (end_ns - self._origin_ns) / 1e9,
        }
        with self._background_lock:
            self._background.append(record)

    def now_ns(self) -> int:
        """The ledger's clock."""
        return self._clock_ns()

    def close(self) -> None:
        """Ends the last section and the file."""
        self._cut(None)
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, span: Span) -> None:
        span.depth = len(self._stack)
        self._stack.append(span)
        span.start_ns = self._clock_ns()

    def _close(self, span: Span) -> None:
        end_ns = self._clock_ns()
        if not self._stack or self._stack[-1] is not span:
            raise RuntimeError(f"span {span.stage}/{span.name} closed out of order")
        self._stack.pop()
        duration_ns = end_ns - span.start_ns
        self_ns = duration_ns - span.children_ns
        section = self._section
        if self._stack:
            self._stack[-1].children_ns += duration_ns
        else:
            section.covered_ns += duration_ns
        totals = section.stages.get(span.stage)
        if totals is None:
            totals = section.stages[span.stage] = _StageTotals()
        totals.self_ns += self_ns
        totals.count += 1
        totals.tokens += span.tokens
        totals.flops += span.flops
        totals.num_bytes += span.num_bytes
        if span.depth == 0 and self._sample_memory is not None:
            totals.memory = _larger(totals.memory, self._sample_memory())
        section.num_spans += 1
        if len(section.spans) < _MAX_SPAN_RECORDS:
            section.spans.append(self._span_record(span, end_ns, self_ns))

    def _span_record(self, span: Span, end_ns: int, self_ns: int) -> dict[str, Any]:
        record = {
            "kind": "span",
            "step": self._section.step,
            "stage": span.stage,
            "name": span.name,
            "depth": span.depth,
            "start_s": (span.start_ns - self._origin_ns) / 1e9,
            "end_s": (end_ns - self._origin_ns) / 1e9,
            "self_s": self_ns / 1e9,
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

    def _cut(self, next_step: int | None) -> None:
        """Ends the present section at this instant and begins the next one at the same instant."""
        if self._stack:
            raise RuntimeError(f"span {self._stack[-1].stage} is still open where a step begins or ends")
        end_ns = self._clock_ns()
        section = self._section
        wall_ns = end_ns - section.start_ns
        unaccounted_ns = wall_ns - section.covered_ns
        self.last_section = SectionTotals(
            step=section.step,
            wall_s=wall_ns / 1e9,
            stage_s={stage: totals.self_ns / 1e9 for stage, totals in section.stages.items()},
            stage_tokens={stage: totals.tokens for stage, totals in section.stages.items()},
            stage_flops={stage: totals.flops for stage, totals in section.stages.items()},
            unaccounted_s=unaccounted_ns / 1e9,
        )
        for record in section.spans:
            self._write(record)
        with self._background_lock:
            background, self._background = self._background, []
        for record in background:
            self._write(record)
        self._write(
            {
                "kind": "section",
                "step": section.step,
                "start_s": (section.start_ns - self._origin_ns) / 1e9,
                "end_s": (end_ns - self._origin_ns) / 1e9,
                "wall_s": wall_ns / 1e9,
                "unaccounted_s": unaccounted_ns / 1e9,
                "num_spans": section.num_spans,
                "num_spans_not_kept": section.num_spans - len(section.spans),
                "stages": {stage: totals.record() for stage, totals in section.stages.items()},
            }
        )
        if self._file is not None:
            self._file.flush()
        self._section = _Section(next_step, end_ns)

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"v": RECORD_VERSION, **record}) + "\n")


def _larger(first: MemorySample, second: MemorySample) -> MemorySample:
    return MemorySample(
        max(first.peak_allocated, second.peak_allocated),
        max(first.peak_reserved, second.peak_reserved),
        max(first.host_rss, second.host_rss),
    )
