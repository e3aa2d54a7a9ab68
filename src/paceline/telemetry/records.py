"""Read the ledger back: typed records, and the figures that follow from them. Torch-free."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.telemetry.ledger import RECORD_VERSION


@dataclass(frozen=True, slots=True)
class StageRecord:
    """Sums of one stage in one section. Memory in bytes: peaks over the section, resident host memory at its end."""

    self_s: float
    count: int
    tokens: int
    flops: float
    bytes: int
    peak_allocated: int
    peak_reserved: int
    host_rss: int


@dataclass(frozen=True, slots=True)
class SectionRecord:
    """A section of one process: a step, or (`step` None) time outside steps. Times since the process's origin."""

    step: int | None
    start_s: float
    end_s: float
    wall_s: float
    unaccounted_s: float
    num_spans: int
    num_spans_not_kept: int
    stages: Mapping[str, StageRecord]


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
    """What one process of a rank recorded; a resumed run has several."""

    unix_s: float
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
        """Step sections in order; a step done again after a resume counts once, as it was done last."""
        latest = {s.step: s for p in self.processes for s in p.sections if s.step is not None}
        return [latest[step] for step in sorted(latest, key=int)]


def read_ledger(run_dir: Path) -> tuple[RankLedger, ...]:
    """Every rank's ledger, by rank. Empty when the run has written none."""
    files = sorted((run_dir / "ledger").glob("rank*.jsonl"), key=lambda p: int(p.stem.removeprefix("rank")))
    return tuple(_read_rank(path) for path in files)


def _read_rank(path: Path) -> RankLedger:
    processes: list[LedgerProcess] = []
    num_torn = 0
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                num_torn += 1
                continue
            _take(record, processes, path)
    return RankLedger(int(path.stem.removeprefix("rank")), tuple(processes), num_torn)


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


def accounted_fraction(sections: Iterable[SectionRecord]) -> float | None:
    """Share of the sections' wall time that spans cover; None when they cover no time at all."""
    wall = unaccounted = 0.0
    for section in sections:
        wall += section.wall_s
        unaccounted += section.unaccounted_s
    return 1.0 - unaccounted / wall if wall else None


def summarise(ledger: RankLedger) -> dict[str, Any]:
    """Figures of one rank: mean and median step seconds, mean seconds by stage, accounted shares.

    Keys: `num_steps`, `step_time_s`, `step_time_median_s`, `stages` (mean self-seconds per step), `unaccounted_s` (mean
    per step), `accounted_fraction` (steps), `accounted_fraction_run` (every section), `wall_s` (every section).
    """
    steps = ledger.steps()
    sections = [section for process in ledger.processes for section in process.sections]
    walls = sorted(step.wall_s for step in steps)
    count = len(steps)
    names = dict.fromkeys(name for step in steps for name in step.stages)
    return {
        "num_steps": count,
        "step_time_s": sum(walls) / count if count else None,
        "step_time_median_s": walls[count // 2] if count else None,
        "stages": {
            name: sum(step.stages[name].self_s for step in steps if name in step.stages) / count
            for name in names
        },
        "unaccounted_s": sum(step.unaccounted_s for step in steps) / count if count else None,
        "accounted_fraction": accounted_fraction(steps),
        "accounted_fraction_run": accounted_fraction(sections),
        "wall_s": sum(section.wall_s for section in sections),
    }
