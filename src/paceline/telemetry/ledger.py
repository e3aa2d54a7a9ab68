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
from difflib import get_close_matches
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Any, Self

from paceline.telemetry.jsonl import open_append
from paceline.telemetry.process_start import claim_process_age_ns
from paceline.telemetry.sections import (
    RECORD_VERSION,
    ClosedSpan,
    MemorySample,
    Section,
    SectionTotals,
)
from paceline.types import STAGES, Cause, Stage

__all__ = [
    "RECORD_VERSION",
    "Ledger",
    "LedgerStage",
    "MemorySample",
    "MemorySampler",
    "SectionTotals",
    "Span",
]

LedgerStage = Stage | str
"""A stage of a step, or `setup` for work outside steps."""

SETUP = "setup"
_STAGES_INSIDE = frozenset(STAGES)
_STAGES_OUTSIDE = frozenset((*STAGES, SETUP))

MemorySampler = Callable[[], MemorySample]
"""Gives the device's peaks since its last call; asked wherever the innermost stage changes, so it must be quick."""

_NOT_YET = -1
_MAX_NOT_FOLDED = 10_000  # bounds memory in a section of very many spans


class Span:
    """An open piece of work; use as a context manager, once; `add` what it did while it is open."""

    __slots__ = (
        "_ledger",
        "absorb",
        "cause",
        "children_ns",
        "depth",
        "end_ns",
        "flops",
        "name",
        "num_bytes",
        "stage",
        "start_ns",
        "tokens",
    )

    def __init__(
        self,
        ledger: "Ledger",
        stage: LedgerStage,
        name: str,
        cause: Cause | None,
        absorb: bool,
        tokens: int,
        flops: float,
        num_bytes: int,
    ) -> None:
        self._ledger, self.stage, self.name, self.cause, self.absorb = ledger, stage, name, cause, absorb
        self.tokens, self.flops, self.num_bytes = tokens, flops, num_bytes
        self.depth = self.end_ns = _NOT_YET

    def add(self, *, tokens: int = 0, flops: float = 0.0, num_bytes: int = 0) -> None:
        """Counts work done inside the span.

        Raises:
            RuntimeError: the span is closed; its sums are taken.
        """
        if self.end_ns != _NOT_YET:
            raise RuntimeError(f"{self} is closed; add to it while it is open")
        self.tokens += tokens
        self.flops += flops
        self.num_bytes += num_bytes

    def __enter__(self) -> Self:
        ledger = self._ledger
        if get_ident() != ledger.thread_id or self.depth != _NOT_YET:
            raise _refusal(self)
        stack = ledger.stack
        if stack:
            outer = stack[-1]
            if outer.absorb:
                self.stage, self.name, self.absorb = outer.stage, f"{self.stage} {self.name}".rstrip(), True
            if outer.stage != self.stage and ledger.sample_memory is not None:
                ledger.section.take_memory(outer.stage, ledger.sample_memory())
        else:
            if ledger.sample_memory is not None:
                ledger.section.take_memory(None, ledger.sample_memory())
            if ledger.on_stage is not None:
                ledger.on_stage(self.stage)
        self.depth = len(stack)
        self.children_ns = 0
        stack.append(self)
        self.start_ns = ledger.now_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ledger = self._ledger
        end_ns = ledger.now_ns()
        stack = ledger.stack
        if not stack or stack[-1] is not self:
            if self.end_ns != _NOT_YET:
                return  # ended with its step or its outer span, which has said so
            if error is None:
                raise RuntimeError(f"{self} closes with {_names(stack)} open; inner spans close first")
            ledger.end_spans_above(self, error)
        stack.pop()
        self.end_ns = end_ns
        if stack:
            outer = stack[-1]
            outer.children_ns += end_ns - self.start_ns
            if outer.stage != self.stage and ledger.sample_memory is not None:
                ledger.section.take_memory(self.stage, ledger.sample_memory())
        else:
            ledger.sample_at_bottom(self.stage)
        closed = ledger.section.closed
        closed.append(self)
        if len(closed) == _MAX_NOT_FOLDED:
            ledger.section.fold()

    def __str__(self) -> str:
        return f"span {self.stage}/{self.name}" if self.name else f"span {self.stage}"


class Ledger:
    """One rank's stack of spans, appended to `path` section by section (None: kept in memory only).

    Arguments:
        sample_memory: gives device peaks where the innermost stage changes, so that a peak counts for the stage that
            caused it, nested or not.
        sample_host: gives resident host memory; asked once for every span that lies in no other.
        since_process_start: count the time from the start of the process to here (the interpreter, imports) as a
            span `start` of stage `setup`. Only the first ledger of a process that asks gets it.
        on_stage: told the stage of every span that lies in no other, as it begins.
    """

    def __init__(
        self,
        path: Path | None = None,
        rank: int = 0,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        sample_memory: MemorySampler | None = None,
        sample_host: Callable[[], int] | None = None,
        since_process_start: bool = False,
        on_stage: Callable[[str], None] | None = None,
    ) -> None:
        self.now_ns = clock_ns
        """The ledger's clock."""
        self.thread_id = get_ident()
        self.sample_memory, self._sample_host = sample_memory, sample_host
        self.on_stage = on_stage
        self.stack: list[Span] = []
        self._background: list[dict[str, Any]] = []
        self._background_lock = threading.Lock()
        self._file = None if path is None else open_append(path)
        now_ns = clock_ns()
        age_ns = claim_process_age_ns() if since_process_start else 0
        self._origin_ns = now_ns - age_ns
        self.section = Section(None, self._origin_ns)
        self.last_section: SectionTotals | None = None
        if age_ns:
            self._note_start(now_ns)
        self._write(
            [{"v": RECORD_VERSION, "kind": "run", "unix_s": time.time() - age_ns / 1e9, "rank": rank}]
        )

    def span(
        self,
        stage: LedgerStage,
        name: str = "",
        *,
        cause: Cause | None = None,
        absorb: bool = False,
        tokens: int = 0,
        flops: float = 0.0,
        num_bytes: int = 0,
    ) -> Span:
        """A span of `stage`. `cause` is what its self-time waits for while nothing runs.

        With `absorb`, spans opened inside it count for this stage too, under their own names: an evaluation generates
        and scores like a step does; absorbed, its seconds are the evaluation's. `tokens`, `flops` and `num_bytes` are
        what is known of its work beforehand; `Span.add` adds the rest.

        Raises:
            ValueError: inside a step, `stage` is none of a step's stages; outside, neither is it `setup`.
        """
        if stage not in _STAGES_INSIDE and (stage != SETUP or self.section.step is not None):
            raise _unknown_stage(stage, self.section.step)
        return Span(self, stage, name, cause, absorb, tokens, flops, num_bytes)

    @contextmanager
    def step(self, step: int, watch: list[ClosedSpan] | None = None) -> Iterator[None]:
        """A step's section. Begins and ends between spans, and in no other step. `watch` gets all its spans, of which
        the record keeps only so many.

        When the step fails, spans that are still open end here and are named in a note on its error.

        Raises:
            RuntimeError: a span is still open where the step begins or ends (its time would belong to two sections),
                another step is under way, or this is not the ledger's thread.
        """
        self._require_own_thread(f"step {step}")
        if self.stack:
            raise RuntimeError(f"{self.stack[-1]} is still open where step {step} begins")
        if self.section.step is not None:
            raise RuntimeError(f"step {step} begins inside step {self.section.step}")
        self._cut(step, watch)
        try:
            yield
        except (
            BaseException
        ) as error:  # whatever it is, it leaves as it came; the step's time is recorded first
            self.end_spans_above(None, error)
            self._cut(None)
            raise
        left_open = _names(self.stack)
        self.end_spans_above(None, None)
        self._cut(None)
        if left_open:
            raise RuntimeError(f"{left_open} is still open where step {step} ends")

    def background(self, stage: LedgerStage, name: str, start_ns: int, end_ns: int) -> None:
        """Notes work of another thread, in this ledger's clock; it owns no wall time. May be called from any thread.

        Raises:
            ValueError: `stage` is neither a stage of a step nor `setup`.
        """
        if stage not in _STAGES_OUTSIDE:
            raise _unknown_stage(stage, None)
        record = {
            "v": RECORD_VERSION,
            "kind": "background",
            "stage": stage,
            "name": name,
            "start_s": (start_ns - self._origin_ns) / 1e9,
            "end_s": (end_ns - self._origin_ns) / 1e9,
        }
        with self._background_lock:
            self._background.append(record)

    def close(self) -> None:
        """Ends the last section and the file. Spans that an error left open end here, and raise nothing: the ledger
        is closed on the way out, where the error itself must stay visible.

        Raises:
            RuntimeError: this is not the ledger's thread.
        """
        self._require_own_thread("its end")
        self.end_spans_above(None, None)
        self._cut(None)
        if self._file is not None:
            self._file.close()
            self._file = None

    def end_spans_above(self, span: Span | None, error: BaseException | None) -> None:
        """Ends every open span inside `span` (None: every open span), named in a note on `error`."""
        left_open = self.stack[0 if span is None else self.stack.index(span) + 1 :]
        if left_open and error is not None:
            error.add_note(f"open in the ledger when this was raised, and ended there: {_names(left_open)}")
        for inner in reversed(left_open):
            inner.__exit__(None, None, None)

    def sample_at_bottom(self, stage: str) -> None:
        """Memory where a span of `stage` that lies in no other ends."""
        if self.sample_memory is not None:
            self.section.take_memory(stage, self.sample_memory())
        if self._sample_host is not None:
            self.section.take_memory(stage, MemorySample(host_rss=self._sample_host()))

    def _note_start(self, now_ns: int) -> None:
        """The span from the start of the process until now."""
        span = Span(self, SETUP, "start", None, False, 0, 0.0, 0)
        span.depth, span.start_ns, span.end_ns, span.children_ns = 0, self._origin_ns, now_ns, 0
        self.section.closed.append(span)

    def adopt(self) -> None:
        """Makes the calling thread the ledger's.

        Raises:
            RuntimeError: a span is open.
        """
        if self.stack:
            raise RuntimeError("a ledger with an open span cannot change its thread")
        self.thread_id = get_ident()

    def _require_own_thread(self, what: str) -> None:
        if get_ident() != self.thread_id:
            raise RuntimeError(
                f"the ledger belongs to the thread that made it, and {what} came from another one"
            )

    def _cut(self, next_step: int | None, watch: list[ClosedSpan] | None = None) -> None:
        """Ends the present section at this instant and begins the next one at the same instant."""
        end_ns = self.now_ns()
        section = self.section
        if self.sample_memory is not None:  # what was allocated since the last span belongs to no stage
            section.take_memory(None, self.sample_memory())
        self.section = Section(next_step, end_ns, watch)
        self.last_section = section.totals(end_ns)
        with self._background_lock:
            background, self._background = self._background, []
        if self._file is not None:
            *spans, totals = section.records(end_ns, self._origin_ns)
            self._write([*spans, *background, totals])

    def _write(self, records: list[dict[str, Any]]) -> None:
        if self._file is not None:
            self._file.write("".join([f"{json.dumps(record)}\n" for record in records]))
            self._file.flush()


def _names(spans: list[Span]) -> str:
    return ", ".join(map(str, spans))


def _refusal(span: Span) -> RuntimeError:
    if span.depth != _NOT_YET:
        return RuntimeError(f"{span} was opened before; take a new one from Ledger.span")
    return RuntimeError(
        f"{span} was opened from another thread than the ledger's: two threads at once would own the same wall time; "
        "note such work with Ledger.background"
    )


def _unknown_stage(stage: str, step: int | None) -> ValueError:
    if stage == SETUP:
        return ValueError(f"stage {stage!r} is for time outside steps, and step {step} is under way")
    allowed = [*STAGES, SETUP] if step is None else list(STAGES)
    nearest = get_close_matches(stage, allowed, n=1, cutoff=0.0)[0]
    return ValueError(f"stage {stage!r} is none of {', '.join(allowed)} (nearest: {nearest!r})")
