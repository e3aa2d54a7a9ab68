"""Torch-profiler traces of any framework as a run: stages from named ranges, causes from what the devices did."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.adapters.run.imported import ImportedRun
from paceline.adapters.run.writing import new_folder, write_heads, write_lines
from paceline.adapters.traces.ranges import Laid, Range, lay_out, section_lines
from paceline.adapters.traces.stage_names import stage_of
from paceline.config.errors import ConfigError
from paceline.telemetry.causes import Cells, Timeline, classify_kernel, classify_operator
from paceline.telemetry.causes.ascend_trace import only_traces, without_text
from paceline.telemetry.causes.records import (
    CAUSES_FOLDER,
    UNACCOUNTED,
    Basis,
    KernelTotal,
    StepCauses,
    cause_lines,
    causes_path,
    total_cells,
)
from paceline.telemetry.causes.torch_trace import Event, TorchTrace, read_torch_trace
from paceline.telemetry.causes.trace_activity import activity_of, collective_totals, kernel_totals
from paceline.telemetry.sections import RECORD_VERSION as LEDGER_VERSION
from paceline.types import CAUSES

_RANK = re.compile(r"rank[_-]?(\d+)", re.IGNORECASE)
_FILE_STEP = re.compile(r"(?:^|[_/-])(?:global_?)?step[_-]?(\d+)", re.IGNORECASE)
_MARGIN_S = 1e-6


@dataclass(slots=True)
class ProfiledStep:
    """One step of a rank: its stages, and the six cells of each (`unaccounted` for time in no stage)."""

    step: int
    start: float
    end: float
    laid: Laid
    cells: dict[str, Cells]
    kernels: tuple[KernelTotal, ...]
    has_device: bool

    def causes(self) -> StepCauses:
        """As causes/rank{r}.jsonl holds it."""
        basis: Basis = "device" if self.has_device else "operators"
        return StepCauses(self.step, self.cells, self.kernels, basis)


@dataclass(slots=True)
class ProfiledRank:
    """What the traces of one rank hold. `unix_s` is the Unix time of its first step, None if the files do not say."""

    rank: int
    steps: list[ProfiledStep] = field(default_factory=list)
    unix_s: float | None = None


@dataclass(slots=True)
class ProfiledRun:
    """Every rank, and what is not known."""

    name: str
    ranks: list[ProfiledRank]
    notes: list[str]
    environment: dict[str, Any]
    sources: dict[str, str]

    def totals(self) -> dict[str, Cells]:
        """Seconds by stage and cause over all ranks and steps."""
        return total_cells(step.causes() for rank in self.ranks for step in rank.steps)


def import_traces(path: Path, name: str | None = None, stage: str | None = None) -> ProfiledRun:
    """Reads every trace at `path` (a file, or a folder that is searched). `stage` is what time in no named range of a
    known stage counts for; default: what the file's name says, else unaccounted.

    Raises:
        ConfigError: there is no readable trace.
    """
    traces, notes = _read(path)
    by_rank: dict[int, list[TorchTrace]] = {}
    for index, trace in enumerate(traces):
        by_rank.setdefault(_rank_of(trace, index), []).append(trace)
    ranks = [_profile_rank(rank, by_rank[rank], stage) for rank in sorted(by_rank)]
    run = ProfiledRun(
        name=name or (path.parent if path.is_file() else path).resolve().name,
        ranks=[rank for rank in ranks if rank.steps],
        notes=[],
        environment=_environment(traces),
        sources={str(trace.path): "torch trace" for trace in traces},
    )
    run.notes = [*notes, *_notes(run, traces)]
    return run


def _read(path: Path) -> tuple[list[TorchTrace], list[str]]:
    if path.is_file():
        files = [path]
    elif path.is_dir():
        found = (one for one in path.rglob("*") if one.name.endswith((".json", ".json.gz")))
        files = only_traces(sorted(found))
    else:
        raise ConfigError("PATH", str(path), "there is no such file or folder")
    traces, notes = [], []
    for file in files:
        try:
            trace = read_torch_trace(file)
        except ValueError as error:
            notes.append(f"Not read: {error}.")
            continue
        if trace.span is not None:
            traces.append(trace)
    if not traces:
        reason = notes[0] if notes else "no .json or .json.gz in it"
        if path.is_dir() and (database := without_text(path)) is not None:
            reason = f"{database.name} is a database; export its timeline with export_type='text'"
        raise ConfigError("PATH", str(path), f"holds no torch-profiler trace: {reason}")
    return traces, notes


def _rank_of(trace: TorchTrace, index: int) -> int:
    if trace.rank is not None:
        return trace.rank
    match = _RANK.search(trace.path.name)
    return int(match.group(1)) if match else index


def _profile_rank(rank: int, traces: Sequence[TorchTrace], stage: str | None) -> ProfiledRank:
    result = ProfiledRank(rank)
    has_clock = all(trace.offset_s is not None for trace in traces)
    base = min((trace.offset_s or 0.0 for trace in traces), default=0.0)
    shift = 0.0
    for trace in sorted(
        traces, key=lambda one: (one.offset_s or 0.0) + (one.span.start if one.span else 0.0)
    ):
        span = trace.span
        if span is None:
            continue
        # times stay near zero, where a float still tells nanoseconds; without a common clock, files follow each other
        offset = (trace.offset_s or 0.0) - base if has_clock else shift - span.start
        shift += span.end - span.start
        if result.unix_s is None and has_clock:
            result.unix_s = base + span.start + offset
        result.steps += _profile(trace, offset, stage or stage_of(trace.path.name))
    _number(result.steps)
    return result


def _number(steps: list[ProfiledStep]) -> None:
    """Steps in order of time; where numbers are missing or occur twice, they count from 1."""
    steps.sort(key=lambda step: step.start)
    numbers = [step.step for step in steps]
    if len(set(numbers)) < len(numbers) or numbers != sorted(numbers) or min(numbers, default=1) < 1:
        for number, step in enumerate(steps, start=1):
            step.step = number


def _profile(trace: TorchTrace, offset: float, fallback: str | None) -> Iterator[ProfiledStep]:
    span = trace.span
    if span is None:
        return
    from_file = _FILE_STEP.search(trace.path.name)
    windows = trace.steps or {int(from_file.group(1)) if from_file else 0: span}
    busy = trace.kernels if trace.has_device else trace.operators
    classify = classify_kernel if trace.has_device else classify_operator
    timeline = Timeline(activity_of(trace, busy, classify))
    ranges = [
        Range(found, one.name, one.start, one.end)
        for one in trace.annotations
        if (found := stage_of(one.name))
    ]
    for number, window in sorted(windows.items()):
        everything = [Range(fallback, trace.path.name, window.start, window.end)] if fallback else []
        laid = lay_out([*everything, *ranges], window.start, window.end)
        cells = _cells(laid, window, timeline)
        kernels = (
            *kernel_totals(busy, classify, window.start, window.end),
            *collective_totals(trace.collectives, window.start, window.end),
        )
        yield ProfiledStep(
            number,
            window.start + offset,
            window.end + offset,
            _moved(laid, offset),
            cells,
            kernels,
            has_device=trace.has_device,
        )


def _cells(laid: Laid, window: Event, timeline: Timeline) -> dict[str, Cells]:
    cells = {stage: timeline.split(laid.intervals(stage)) for stage in laid.segments}
    whole = timeline.split(np.array([[window.start, window.end]]))
    rest = {cause: whole[cause] - sum(cells[stage][cause] for stage in cells) for cause in CAUSES}
    if sum(rest.values()) > _MARGIN_S:
        cells[UNACCOUNTED] = {cause: max(0.0, value) for cause, value in rest.items()}
    return cells


def _moved(laid: Laid, offset: float) -> Laid:
    segments = {
        stage: [(start + offset, end + offset) for start, end in pairs]
        for stage, pairs in laid.segments.items()
    }
    spans = [
        (Range(one.stage, one.name, one.start + offset, one.end + offset), depth, self_s)
        for one, depth, self_s in laid.spans
    ]
    return Laid(segments, spans)


def _environment(traces: Sequence[TorchTrace]) -> dict[str, Any]:
    names = [trace.device_name for trace in traces if trace.device_name]
    sizes = [trace.world_size for trace in traces if trace.world_size]
    return {
        "device": "cuda" if names else ("cpu" if not any(trace.has_device for trace in traces) else None),
        "device_name": names[0] if names else None,
        "num_devices": max(sizes, default=None),
    }


def _notes(run: ProfiledRun, traces: Sequence[TorchTrace]) -> list[str]:
    notes = [_causes_sentence(run)]
    unknown, total = _unknown_seconds(run)
    if unknown:
        notes.append(
            f"Kernels that no pattern knows took {unknown:.3g} s of {total:.3g} s of kernel time; they count as "
            f"compute and are listed in {CAUSES_FOLDER}/."
        )
    if not any(trace.has_device for trace in traces):
        notes.append("No device was traced: the causes are from host operators.")
    if any(not trace.steps for trace in traces):
        notes.append("Some traces mark no steps; each such file counts as one.")
    if run.environment["num_devices"] and run.environment["num_devices"] > len(run.ranks):
        notes.append(f"Traces of {len(run.ranks)} of {run.environment['num_devices']} ranks are there.")
    notes.append(
        "A stage's causes are what its device did while the host was in the stage: work queued before counts where it "
        "ran. A profiler slows the host down, so scheduling is an upper bound."
    )
    return notes


def _causes_sentence(run: ProfiledRun) -> str:
    totals = run.totals()
    whole = sum(sum(cells.values()) for cells in totals.values())
    shares = (
        {cause: sum(cells[cause] for cells in totals.values()) / whole for cause in CAUSES} if whole else {}
    )
    return "Of the traced time: " + ", ".join(f"{cause} {share:.1%}" for cause, share in shares.items()) + "."


def _unknown_seconds(run: ProfiledRun) -> tuple[float, float]:
    kernels = [kernel for rank in run.ranks for step in rank.steps for kernel in step.kernels]
    return sum(k.total_s for k in kernels if not k.is_known), sum(k.total_s for k in kernels)


def write_profile(run: ProfiledRun, run_dir: Path) -> Path:
    """Writes the folder of a run: a ledger and causes/rank{r}.jsonl for every rank.

    Raises:
        ConfigError: the folder holds something already; nothing is overwritten.
    """
    new_folder(run_dir)
    (run_dir / CAUSES_FOLDER).mkdir()
    for rank in run.ranks:
        write_lines(run_dir / "ledger" / f"rank{rank.rank}.jsonl", _ledger_lines(rank))
        lines = (line for step in rank.steps for line in cause_lines(step.causes()))
        write_lines(causes_path(run_dir, rank.rank), lines)
    head = ImportedRun(
        "torch profiler", run.name, [], run.notes, environment=run.environment, sources=run.sources
    )
    write_heads(head, run_dir, run.notes, max((len(rank.steps) for rank in run.ranks), default=0))
    return run_dir


def _ledger_lines(rank: ProfiledRank) -> Iterator[dict[str, Any]]:
    origin = rank.steps[0].start
    yield {"v": LEDGER_VERSION, "kind": "run", "unix_s": rank.unix_s or 0.0, "rank": rank.rank}
    for step in rank.steps:
        yield from section_lines(step.laid, step.step, step.start, step.end, origin)


def causes_text(run: ProfiledRun) -> str:
    """The six cells of every stage, mean per rank and step, and the kernels that no pattern knows."""
    count = sum(len(rank.steps) for rank in run.ranks)
    lines = [f"{'stage':<14}" + "".join(f"{cause:>15}" for cause in CAUSES) + f"{'all':>12}   ms per step"]
    for stage, cells in sorted(run.totals().items(), key=lambda pair: -sum(pair[1].values())):
        values = [cells[cause] * 1000 / count for cause in CAUSES]
        lines.append(
            f"{stage:<14}" + "".join(f"{value:>15.3f}" for value in values) + f"{sum(values):>12.3f}"
        )
    unknown: dict[str, float] = {}
    for rank in run.ranks:
        for step in rank.steps:
            for kernel in step.kernels:
                if not kernel.is_known:
                    unknown[kernel.name] = unknown.get(kernel.name, 0.0) + kernel.total_s
    for name, seconds in sorted(unknown.items(), key=lambda pair: -pair[1])[:20]:
        lines.append(f"unknown kernel: {name}: {seconds * 1000 / count:.3f} ms per step")
    return "\n".join(lines)
