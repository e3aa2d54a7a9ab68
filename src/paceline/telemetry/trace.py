"""A run's spans as a trace that Perfetto and chrome://tracing open (the Trace Event Format). Torch-free.

One process per rank; its tracks are the sections (steps and what lies between), the stack of spans, and as many tracks
of background work as overlap at one time. Counters show memory, causes of profiled steps, and samples of device and
host. Time 0 is the start of the run's first process; a resumed run's processes
lie after one another as they did on the clock.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.telemetry.causes.records import RankCauses, read_causes
from paceline.telemetry.device.records import RankDevice, read_device_samples
from paceline.telemetry.records import (
    BackgroundRecord,
    LedgerProcess,
    RankLedger,
    SectionRecord,
    SpanRecord,
    read_ledger,
)
from paceline.telemetry.trace_counters import cause_counters, causes_by_step, device_counters

TRACE_FILE = "trace.json"

_SECTIONS, _SPANS, _BACKGROUND = 0, 1, 2


def trace_events(
    ledgers: Sequence[RankLedger], causes: Sequence[RankCauses] = (), devices: Sequence[RankDevice] = ()
) -> dict[str, Any]:
    """The trace as a JSON object; times in microseconds, `pid` is the rank."""
    cells = causes_by_step(causes)
    causes_of, device_of = {one.rank: one for one in causes}, {one.rank: one for one in devices}
    starts = [process.unix_s for ledger in ledgers for process in ledger.processes]
    origin_s = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for ledger in ledgers:
        num_lanes = 0
        for process in ledger.processes:
            offset_s = process.unix_s - origin_s
            lanes = _lanes(process.background)
            num_lanes = max(num_lanes, 1 + max(lanes, default=-1))
            events += _process_events(process, lanes, ledger.rank, offset_s, cells)
        if ledger.rank in causes_of:
            events += cause_counters(ledger, causes_of[ledger.rank], origin_s)
        if ledger.rank in device_of:
            events += device_counters(device_of[ledger.rank], origin_s)
        events += _track_names(ledger.rank, num_lanes)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_trace(run_dir: Path, path: Path | None = None) -> Path:
    """Writes the trace of a run's records to `path` (default: `trace.json` in its folder) and returns where.

    Raises:
        FileNotFoundError: the run has no ledger.
    """
    ledgers = read_ledger(run_dir)
    if not ledgers:
        raise FileNotFoundError(f"{run_dir / 'ledger'}: no ledger to make a trace of")
    path = path or run_dir / TRACE_FILE
    events = trace_events(ledgers, read_causes(run_dir), read_device_samples(run_dir))
    path.write_text(json.dumps(events, allow_nan=False), encoding="utf-8")
    return path


def _process_events(
    process: LedgerProcess,
    lanes: Sequence[int],
    rank: int,
    offset_s: float,
    cells: Mapping[tuple[int, int], Mapping[str, Mapping[str, float]]],
) -> Iterator[dict[str, Any]]:
    for section in process.sections:
        name = "outside steps" if section.step is None else f"step {section.step}"
        figures: dict[str, Any] = {
            "unaccounted_s": section.unaccounted_s,
            "num_spans": section.num_spans,
            "num_spans_not_kept": section.num_spans_not_kept,
        }
        if section.step is not None and (rank, section.step) in cells:
            figures["causes_s"] = cells[rank, section.step]
        yield _slice(name, "section", section, rank, _SECTIONS, offset_s, figures)
        yield from _memory_counters(section, rank, offset_s)
    for span in process.spans:
        name = f"{span.stage}: {span.name}" if span.name else span.stage
        yield _slice(name, span.stage, span, rank, _SPANS, offset_s, _span_figures(span))
    for lane, work in zip(lanes, process.background, strict=True):
        yield _slice(f"{work.stage}: {work.name}", work.stage, work, rank, _BACKGROUND + lane, offset_s, {})


def _slice(
    name: str,
    category: str,
    record: SectionRecord | SpanRecord | BackgroundRecord,
    rank: int,
    track: int,
    offset_s: float,
    figures: dict[str, Any],
) -> dict[str, Any]:
    """A complete event ("X"): begin and duration."""
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": rank,
        "tid": track,
        "ts": (record.start_s + offset_s) * 1e6,
        "dur": (record.end_s - record.start_s) * 1e6,
        "args": figures,
    }


def _span_figures(span: SpanRecord) -> dict[str, Any]:
    figures: dict[str, Any] = {"step": span.step, "self_s": span.self_s}
    optional = {"cause": span.cause, "tokens": span.tokens, "flops": span.flops, "bytes": span.bytes}
    return figures | {name: value for name, value in optional.items() if value}


def _memory_counters(section: SectionRecord, rank: int, offset_s: float) -> Iterator[dict[str, Any]]:
    """Counter events ("C") at a section's end: its peaks."""
    counters = {
        "device memory peak": {"allocated": section.peak_allocated, "reserved": section.peak_reserved},
        "host memory": {"rss": section.host_rss},
    }
    for name, values in counters.items():
        if any(values.values()):
            yield {
                "ph": "C",
                "name": name,
                "pid": rank,
                "ts": (section.end_s + offset_s) * 1e6,
                "args": values,
            }


def _lanes(background: Sequence[BackgroundRecord]) -> list[int]:
    """A track per piece of work such that pieces on one track do not overlap, as few tracks as possible."""
    busy_until: list[float] = []
    lanes = [0] * len(background)
    for index in sorted(range(len(background)), key=lambda i: background[i].start_s):
        work = background[index]
        free = next((lane for lane, end_s in enumerate(busy_until) if end_s <= work.start_s), None)
        if free is None:
            free = len(busy_until)
            busy_until.append(0.0)
        busy_until[free] = work.end_s
        lanes[index] = free
    return lanes


def _track_names(rank: int, num_lanes: int) -> Iterator[dict[str, Any]]:
    """Metadata events ("M"): names of the process and its tracks."""
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    names = ["steps", "spans", *(f"background {lane + 1}" for lane in range(num_lanes))]
    for track, name in enumerate(names):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}}
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": rank,
            "tid": track,
            "args": {"sort_index": track},
        }
