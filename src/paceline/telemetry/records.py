"""Read the ledger back: typed records, and the figures that follow from them. Torch-free."""

import gc
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.telemetry.jsonl import current_steps, read_lines
from paceline.telemetry.sections import RECORD_VERSION


@dataclass(frozen=True, slots=True)
class StageRecord:
    """Sums of one stage in one section. Memory in bytes: device peaks while the stage was the innermost one, and
    resident host memory where its spans that lie in no other ended. `cause_s` is what of `self_s` spans that name a
    cause own."""

    self_s: float
    count: int
    tokens: int
    flops: float
    bytes: int
    peak_allocated: int
    peak_reserved: int
    host_rss: int
    cause_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SectionRecord:
    """A section of one process: a step, or (`step` None) time outside steps. Times since the process's origin.

    Memory in bytes, the largest of the section, time outside spans included.
    """

    step: int | None
    start_s: float
    end_s: float
    wall_s: float
    unaccounted_s: float
    num_spans: int
    num_spans_not_kept: int
    stages: Mapping[str, StageRecord]
    peak_allocated: int = 0
    peak_reserved: int = 0
    host_rss: int = 0


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """One span for the timeline."""

    step: int | None
    stage: str
    name: str
    depth: int
    start_s: float
    end_s: float
    self_s: float
    cause: str | None = None
    tokens: int = 0
    flops: float = 0.0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class BackgroundRecord:
    """Work of another thread; owns no wall time."""

    stage: str
    name: str
    start_s: float
    end_s: float


@dataclass(slots=True)
class LedgerProcess:
    """What one process of a rank recorded; a resumed run has several.

    `unix_s` is the Unix time of its origin. Where the line that says so is torn, it is an estimate
    (`is_start_estimated`): the process ran right before the next one, or right after the one before.
    """

    unix_s: float
    is_start_estimated: bool = False
    sections: list[SectionRecord] = field(default_factory=list)
    spans: list[SpanRecord] = field(default_factory=list)
    background: list[BackgroundRecord] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RankLedger:
    """A rank's file. `num_torn_lines` counts lines a killed process left half-written."""

    rank: int
    processes: tuple[LedgerProcess, ...]
    num_torn_lines: int

    def steps(self) -> list[SectionRecord]:
        """Step sections that count, in order: a step done again after a resume once, as it was done last, and no step
        that the resumed run has gone back behind (see `jsonl.current_steps`)."""
        steps = [(s.step, s) for p in self.processes for s in p.sections if s.step is not None]
        return [section for _, section in current_steps(steps, lambda numbered: numbered[0])]


def ledger_files(run_dir: Path) -> list[Path]:
    """The ranks' files, by rank."""
    return sorted((run_dir / "ledger").glob("rank*.jsonl"), key=lambda p: int(p.stem.removeprefix("rank")))


def read_ledger(run_dir: Path, spans_of: Collection[int] | None = None) -> tuple[RankLedger, ...]:
    """Every rank's ledger, by rank. Empty when the run has written none.

    With `spans_of`, only the spans of these steps, and those outside steps, are read: a run of many ranks and steps has
    millions, and its sections hold all of their sums.
    """
    with _uncollected():
        return tuple(read_rank_ledger(path, spans_of) for path in ledger_files(run_dir))


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage collection: everything that is read stays, so that looking for garbage in between finds none and, with
    a million records, takes as long as reading them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_SPAN_OF_STEP = '{"v": 1, "kind": "span", "step": '
"""How the ledger begins a span's line; a line written otherwise is parsed to know its step."""


def _skips_spans(spans_of: Collection[int]) -> Callable[[str], bool]:
    kept = {"null", *map(str, spans_of)}
    begin = len(_SPAN_OF_STEP)

    def skip(line: str) -> bool:
        is_span = line.startswith(_SPAN_OF_STEP) and line.endswith("}\n")
        return is_span and line[begin : line.index(",", begin)] not in kept

    return skip


def read_rank_ledger(path: Path, spans_of: Collection[int] | None = None) -> RankLedger:
    """One rank's file; see `read_ledger`."""
    processes: list[LedgerProcess] = []
    num_torn = 0
    after_torn = False
    for record in read_lines(path, None if spans_of is None else _skips_spans(spans_of)):
        if record is None:
            num_torn += 1
            after_torn = True
            continue
        if spans_of is not None and record["kind"] == "span" and not _wanted(record["step"], spans_of):
            after_torn = False
            continue
        if _begins_unseen(record, processes, after_torn):
            processes.append(LedgerProcess(0.0, is_start_estimated=True))
        _take(record, processes, path)
        after_torn = False
    _estimate_starts(processes)
    return RankLedger(int(path.stem.removeprefix("rank")), tuple(processes), num_torn)


def _wanted(step: int | None, spans_of: Collection[int]) -> bool:
    return step is None or step in spans_of


def _begins_unseen(record: Mapping[str, Any], processes: list[LedgerProcess], after_torn: bool) -> bool:
    """Whether `record` is the first of a process whose `run` line is torn: its clock is behind that of the last."""
    if record["kind"] == "run":
        return False
    if not processes:
        return True
    return after_torn and record["start_s"] < _length_s(processes[-1])


def _length_s(process: LedgerProcess) -> float:
    """Seconds from a process's origin to the end of its last section."""
    return process.sections[-1].end_s if process.sections else 0.0


def _estimate_starts(processes: list[LedgerProcess]) -> None:
    """Puts processes of unknown start against the one before, and leading ones against the one after."""
    for before, process in pairwise(processes):
        if process.is_start_estimated and before.unix_s:
            process.unix_s = before.unix_s + _length_s(before)
    for after, process in pairwise(reversed(processes)):
        if process.is_start_estimated and not process.unix_s and after.unix_s:
            process.unix_s = after.unix_s - _length_s(process)


def _take(record: dict[str, Any], processes: list[LedgerProcess], path: Path) -> None:
    version = record.pop("v")
    if version != RECORD_VERSION:
        raise ValueError(
            f"{path}: a record of version {version}; this paceline reads version {RECORD_VERSION}"
        )
    match record.pop("kind"):
        case "run":
            processes.append(LedgerProcess(record["unix_s"]))
        case "section":
            stages = {name: StageRecord(**totals) for name, totals in record.pop("stages").items()}
            processes[-1].sections.append(SectionRecord(stages=stages, **record))
        case "span":
            processes[-1].spans.append(SpanRecord(**record))
        case "background":
            processes[-1].background.append(BackgroundRecord(**record))
        case other:
            raise ValueError(f"{path}: a record of kind {other!r}; version {RECORD_VERSION} has no such kind")


def accounted_fraction(sections: Iterable[SectionRecord]) -> float | None:
    """Share of the sections' wall time that spans cover; None when they cover no time at all."""
    wall = unaccounted = 0.0
    for section in sections:
        wall += section.wall_s
        unaccounted += section.unaccounted_s
    return 1.0 - unaccounted / wall if wall else None


def summarise(ledger: RankLedger, timed: Sequence[SectionRecord] | None = None) -> dict[str, Any]:
    """Figures of one rank: mean and median step seconds, mean seconds by stage, accounted shares.

    Keys: `num_steps`, `step_time_s`, `step_time_median_s`, `stages` (mean self-seconds per step), `unaccounted_s` (mean
    per step), `accounted_fraction` (steps), `accounted_fraction_run` (every section), `wall_s` (every section).
    `timed`: the steps that all but `num_steps` and the last two are taken from; None stands for all.
    """
    num_steps = len(ledger.steps())
    steps = ledger.steps() if timed is None else timed
    sections = [section for process in ledger.processes for section in process.sections]
    walls = [step.wall_s for step in steps]
    count = len(steps)
    names = dict.fromkeys(name for step in steps for name in step.stages)
    return {
        "num_steps": num_steps,
        "step_time_s": sum(walls) / count if count else None,
        "step_time_median_s": statistics.median(walls) if count else None,
        "stages": {
            name: sum(step.stages[name].self_s for step in steps if name in step.stages) / count
            for name in names
        },
        "unaccounted_s": sum(step.unaccounted_s for step in steps) / count if count else None,
        "accounted_fraction": accounted_fraction(steps),
        "accounted_fraction_run": accounted_fraction(sections),
        "wall_s": sum(section.wall_s for section in sections),
    }
