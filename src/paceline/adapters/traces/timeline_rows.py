"""Timeline rows (role, name, rank, begin, end), as RL-Insight's offline parsers write them, as ledgers.

Read from .csv, .jsonl, .json (a list) and .parquet. Columns may be called `rank` or `rank_id`, `start` or `start_time`,
`end` or `end_time`, with `_ms`, `_us`, `_ns` or `_s` for the unit; without one they are milliseconds.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from paceline.adapters.run.imported import ImportedRun
from paceline.adapters.run.writing import new_folder, write_heads, write_lines
from paceline.adapters.traces.ranges import Range, lay_out, section_lines
from paceline.adapters.traces.stage_names import stage_of
from paceline.config.errors import ConfigError
from paceline.telemetry.causes.cells import covered, disjoint
from paceline.telemetry.sections import RECORD_VERSION as LEDGER_VERSION

UNITS = {"_ms": 1e-3, "_us": 1e-6, "_ns": 1e-9, "_s": 1.0, "": 1e-3}
_OVERLAP = 0.01
"""Share of a role's time that may run beside another role of the same rank id before they are taken for two devices."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row, in seconds."""

    role: str
    name: str
    rank: int
    start: float
    end: float

    @property
    def stage(self) -> str | None:
        """The stage of its name, with its role where the same name means two things."""
        if self.role.lower().startswith(("ref", "critic")) and (
            found := stage_of(f"{self.role}_{self.name}")
        ):
            return found
        return stage_of(self.name) or stage_of(f"{self.role}_{self.name}")


@dataclass(slots=True)
class RowsRun:
    """Rows by ledger rank, the times at which steps end, and what is not known."""

    name: str
    lanes: dict[int, list[Row]]
    labels: dict[int, str]
    cuts: list[float]
    notes: list[str] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)


def import_rows(path: Path, name: str | None = None) -> RowsRun:
    """Reads one file of rows.

    Raises:
        ConfigError: the file cannot be read, lacks a column, or holds no row.
    """
    rows, num_bad = _read(path)
    if not rows:
        raise ConfigError("PATH", str(path), "holds no row with a role, a name, a rank, a begin and an end")
    lanes, labels = _lanes(rows)
    run = RowsRun(name or path.stem, lanes, labels, _cuts(rows), sources={str(path): "timeline rows"})
    run.notes = _notes(run, rows, num_bad)
    return run


def _read(path: Path) -> tuple[list[Row], int]:
    records = list(_records(path))
    columns = _columns(path, records[0]) if records else {}
    rows: list[Row] = []
    for record in records:
        row = _row(record, columns)
        if row is not None:
            rows.append(row)
    return rows, len(records) - len(rows)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise ConfigError("PATH", str(path), "there is no such file")
    try:
        if path.suffix == ".parquet":
            yield from pq.read_table(path).to_pylist()
        elif path.suffix == ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                yield from csv.DictReader(file)
        elif path.suffix == ".jsonl":
            for line in path.read_text(encoding="utf-8").splitlines():
                if line.strip():
                    yield json.loads(line)
        else:
            yield from json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError("PATH", str(path), f"is not readable as rows ({error})") from error


def _columns(path: Path, record: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """Our field to the file's column and its unit in seconds."""
    if not isinstance(record, dict):
        raise ConfigError("PATH", str(path), "must hold one object a row")
    wanted = {"role": ("role",), "name": ("name",), "rank": ("rank_id", "rank")}
    found: dict[str, tuple[str, float]] = {}
    for ours, names in wanted.items():
        if column := next((one for one in names if one in record), None):
            found[ours] = (column, 1.0)
    for ours in ("start", "end"):
        for stem in (f"{ours}_time", ours):
            for suffix, unit in UNITS.items():
                if f"{stem}{suffix}" in record and ours not in found:
                    found[ours] = (f"{stem}{suffix}", unit)
    missing = [one for one in ("role", "name", "rank", "start", "end") if one not in found]
    if missing:
        raise ConfigError(
            "PATH", str(path), f"has no column for {', '.join(missing)}; it has {', '.join(record)}"
        )
    return found


def _row(record: dict[str, Any], columns: dict[str, tuple[str, float]]) -> Row | None:
    try:
        start, end = (float(record[columns[one][0]]) * columns[one][1] for one in ("start", "end"))
        rank = int(
            str(record[columns["rank"][0]]).rpartition("_")[2]
        )  # `rank_3` and `replica_0` are written too
    except (KeyError, TypeError, ValueError):
        return None
    if end < start:
        return None
    return Row(str(record[columns["role"][0]]), str(record[columns["name"][0]]), rank, start, end)


def _lanes(rows: Sequence[Row]) -> tuple[dict[int, list[Row]], dict[int, str]]:
    """Rows by ledger rank. Roles of one rank id share a device when they take turns; those that run at the same time as
    the role with most rows have devices of their own, numbered after the others."""
    by_id: dict[int, dict[str, list[Row]]] = {}
    for row in rows:
        by_id.setdefault(row.rank, {}).setdefault(row.role, []).append(row)
    lanes: dict[int, list[Row]] = {}
    labels: dict[int, str] = {}
    apart: list[tuple[str, int, list[Row]]] = []
    for rank, by_role in sorted(by_id.items()):
        for role, own in sorted(by_role.items(), key=lambda pair: (_is_rollout(pair[1]), pair[0])):
            if rank in lanes and _overlap(own, lanes[rank]) > _OVERLAP:
                apart.append((role, rank, own))
                continue
            lanes.setdefault(rank, []).extend(own)
            labels[rank] = f"{labels[rank]}, {role}" if rank in labels else role
    first_free = max(lanes) + 1
    for number, (role, rank, own) in enumerate(sorted(apart, key=lambda one: one[:2])):
        lanes[first_free + number] = own
        labels[first_free + number] = f"{role} {rank}"
    return lanes, labels


def _is_rollout(rows: Iterable[Row]) -> bool:
    return any(row.stage == "rollout" for row in rows)


def _overlap(some: Sequence[Row], others: Sequence[Row]) -> float:
    """Share of `some`'s time in which one of `others` runs too."""
    union, windows = (disjoint(np.array([(row.start, row.end) for row in rows])) for rows in (others, some))
    length = float(np.sum(windows[:, 1] - windows[:, 0]))
    return covered(union, windows) / length if length else 0.0


def _cuts(rows: Sequence[Row]) -> list[float]:
    """Where steps end: after the weights are handed over (where rows say when), else after the actor's update, when the
    next step's work begins."""
    has_sync = any(row.stage == "sync" for row in rows)
    last, first = ("sync", "update_actor") if has_sync else ("update_actor", "rollout")
    cuts: list[float] = []
    end: float | None = None
    for row in sorted(rows, key=lambda one: one.start):
        if row.stage == last:
            end = row.end if end is None else max(end, row.end)
        elif row.stage == first and end is not None and row.start >= end:
            cuts.append(end)
            end = None
    return cuts if end is None else [*cuts, end]


def _notes(run: RowsRun, rows: Sequence[Row], num_bad: int) -> list[str]:
    notes = []
    if run.cuts:
        notes.append(
            "Rows name no step: it ends, for all ranks, where its weights are handed over or its last update ends."
        )
    else:
        notes.append("Rows show no update of the actor, so no step is known; all time is outside steps.")
    unknown = sorted({row.name for row in rows if row.stage is None})
    if unknown:
        notes.append(
            f"Names of no known stage, left to the row around them or unaccounted: {', '.join(unknown)}."
        )
    if any(str(rank) != label and label for rank, label in run.labels.items()):
        notes.append(
            "Ranks: " + "; ".join(f"{rank} is {label}" for rank, label in sorted(run.labels.items())) + "."
        )
    notes.append("Rows hold no tokens, FLOPs or memory.")
    if num_bad:
        notes.append(f"{num_bad} rows lack a number or end before they begin, and were left out.")
    return notes


def write_rows(run: RowsRun, run_dir: Path) -> Path:
    """Writes the folder of a run with a ledger of every rank.

    Raises:
        ConfigError: the folder holds something already; nothing is overwritten.
    """
    new_folder(run_dir)
    for rank, rows in run.lanes.items():
        write_lines(run_dir / "ledger" / f"rank{rank}.jsonl", _lines(run, rank, rows))
    environment = {"lanes": {str(rank): label for rank, label in sorted(run.labels.items())}}
    head = ImportedRun("timeline rows", run.name, [], run.notes, environment=environment, sources=run.sources)
    write_heads(head, run_dir, run.notes, len(run.cuts))
    return run_dir


def _lines(run: RowsRun, rank: int, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    everything = [row for lane in run.lanes.values() for row in lane]
    origin = min(row.start for row in everything)
    end = max(row.end for row in everything)
    # times that count from 1970 are kept; others have no date
    yield {"v": LEDGER_VERSION, "kind": "run", "unix_s": origin if origin > 1e9 else 0.0, "rank": rank}
    ranges = [Range(stage, row.name, row.start, row.end) for row in rows if (stage := row.stage)]
    start = origin
    for step, cut in enumerate(run.cuts, start=1):
        yield from section_lines(lay_out(ranges, start, cut), step, start, cut, origin)
        start = cut
    if end > start:
        yield from section_lines(lay_out(ranges, start, end), None, start, end, origin)
