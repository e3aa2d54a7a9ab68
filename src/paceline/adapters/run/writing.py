"""Writes an imported run as the folder of a run, which `paceline report` reads like any other."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.adapters.run.imported import ImportedRun, ImportedStep
from paceline.config.errors import ConfigError
from paceline.config.yaml_scalars import write_yaml
from paceline.telemetry.jsonl import encode_number
from paceline.telemetry.metric_schema import spec_of
from paceline.telemetry.metrics import METRICS_FILE
from paceline.telemetry.metrics import RECORD_VERSION as METRICS_VERSION
from paceline.telemetry.records import SectionRecord, SpanRecord, StageRecord
from paceline.telemetry.sections import RECORD_VERSION as LEDGER_VERSION

FOREIGN_FILE = "foreign_metrics.jsonl"
VERSION = 1
IMPORTED = "imported"
"""Status in summary.json: how the run ended is not known."""

_ROUNDING_S = 1e-6


def write_run(run: ImportedRun, run_dir: Path) -> Path:
    """Writes config.yaml, env.json, summary.json, metrics.jsonl, foreign_metrics.jsonl, the ledger of rank 0, samples.

    Raises:
        ConfigError: the folder holds something already; nothing is overwritten.
    """
    new_folder(run_dir)
    notes = list(run.notes)
    write_lines(run_dir / "ledger" / "rank0.jsonl", _ledger(run, notes))
    write_lines(run_dir / METRICS_FILE, (_metrics(step) for step in run.steps if step.metrics))
    write_lines(run_dir / FOREIGN_FILE, (_foreign(step) for step in run.steps if step.foreign))
    for number, rows in run.samples.items():
        (run_dir / "samples").mkdir(exist_ok=True)
        write_lines(run_dir / "samples" / f"step{number}.jsonl", rows)
    write_heads(run, run_dir, notes, sum(step.wall_s is not None for step in run.steps))
    return run_dir


def new_folder(run_dir: Path) -> None:
    """Makes the run's folder with `ledger/` in it. Raises `ConfigError` when it holds something already."""
    if run_dir.exists() and any(run_dir.iterdir()):
        raise ConfigError("--out", str(run_dir), "must be empty or not exist; nothing is overwritten")
    (run_dir / "ledger").mkdir(parents=True, exist_ok=True)


def write_heads(run: ImportedRun, run_dir: Path, notes: list[str], num_steps: int) -> None:
    """config.yaml, env.json and summary.json, which every imported run has."""
    config = {**run.config, "run": {"name": run.name, **run.config.get("run", {})}}
    (run_dir / "config.yaml").write_text(write_yaml(config), encoding="utf-8")
    environment = {"v": VERSION, "framework": run.framework, **run.environment}
    (run_dir / "env.json").write_text(json.dumps(environment, indent=2), encoding="utf-8")
    summary = {
        "v": VERSION,
        "status": IMPORTED,
        "message": f"imported from {run.framework}",
        "num_steps": num_steps,
        "notes": notes,
        "sources": dict(run.sources),
    }
    (run_dir / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line."""
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, allow_nan=False) + "\n")


def _metrics(step: ImportedStep) -> dict[str, Any]:
    values = {spec_of(name).name: encode_number(float(value)) for name, value in step.metrics.items()}
    return {"v": METRICS_VERSION, "step": step.step, "time": step.unix_s or 0.0, "metrics": values}


def _foreign(step: ImportedStep) -> dict[str, Any]:
    values = {name: encode_number(float(value)) for name, value in step.foreign.items()}
    return {"v": VERSION, "step": step.step, "metrics": values}


def _ledger(run: ImportedRun, notes: list[str]) -> Iterator[dict[str, Any]]:
    steps = [step for step in run.steps if step.wall_s is not None]
    yield {"v": LEDGER_VERSION, "kind": "run", "unix_s": _start(run, steps, notes), "rank": 0}
    excesses: list[float] = []
    now, previous_end = 0.0, None
    for step in steps:
        if previous_end is not None and step.unix_s is not None and step.wall_s is not None:
            gap = step.unix_s - previous_end - step.wall_s - sum(step.after_s.values())
            if gap > 0:
                yield section_line(_outside(now, gap, {}))
                now += gap
        for line, end in _step_lines(step, now, excesses):
            yield line
            now = end
        previous_end = step.unix_s
    if excesses:
        notes.append(
            f"In {len(excesses)} of {len(steps)} steps the stages add up to more than the step (by up to "
            f"{max(excesses):.3g} s): they overlap, or are averaged over other windows. Such a step is drawn as "
            "long as its stages; time/step is the logged one."
        )


def _start(run: ImportedRun, steps: list[ImportedStep], notes: list[str]) -> float:
    first = next((step for step in steps if step.unix_s is not None), None)
    if first is not None and first.unix_s is not None:
        earlier = [one for one in steps if one.step <= first.step]
        before = sum((one.wall_s or 0.0) + sum(one.after_s.values()) for one in earlier)
        return first.unix_s - before
    if run.end_unix_s is None:
        return 0.0
    notes.append("When the run started is estimated from the log file's time; lines carry none.")
    return run.end_unix_s - sum((step.wall_s or 0.0) + sum(step.after_s.values()) for step in steps)


def _step_lines(
    step: ImportedStep, start: float, excesses: list[float]
) -> Iterator[tuple[dict[str, Any], float]]:
    """The lines of a step and of what came after it, each with the time it ends."""
    covered = sum(stage.seconds for stage in step.stages.values())
    wall = step.wall_s or 0.0
    if covered > wall + _ROUNDING_S:
        excesses.append(covered - wall)
    wall = max(wall, covered)
    now = start
    for name, stage in step.stages.items():
        span = SpanRecord(
            step.step, name, "", 0, now, now + stage.seconds, stage.seconds, tokens=stage.tokens
        )
        yield span_line(span), now
        now += stage.seconds
    end = start + wall
    stages = {name: _stage_record(stage.seconds, stage.tokens) for name, stage in step.stages.items()}
    section = SectionRecord(
        step=step.step,
        start_s=start,
        end_s=end,
        wall_s=wall,
        unaccounted_s=wall - covered,
        num_spans=len(stages),
        num_spans_not_kept=0,
        stages=stages,
        peak_allocated=step.peak_allocated,
        peak_reserved=step.peak_reserved,
    )
    yield section_line(section), end
    if step.after_s:
        seconds = sum(step.after_s.values())
        begin = end
        for name, length in step.after_s.items():
            yield span_line(SpanRecord(None, name, "", 0, begin, begin + length, length)), begin
            begin += length
        yield section_line(_outside(end, seconds, step.after_s)), end + seconds


def _stage_record(seconds: float, tokens: int = 0) -> StageRecord:
    return StageRecord(seconds, 1, tokens, 0.0, 0, 0, 0, 0)


def _outside(start: float, seconds: float, stages: dict[str, float]) -> SectionRecord:
    return SectionRecord(
        step=None,
        start_s=start,
        end_s=start + seconds,
        wall_s=seconds,
        unaccounted_s=seconds - sum(stages.values()),
        num_spans=len(stages),
        num_spans_not_kept=0,
        stages={name: _stage_record(value) for name, value in stages.items()},
    )


def section_line(section: SectionRecord) -> dict[str, Any]:
    """A section as the ledger writes it."""
    return {"v": LEDGER_VERSION, "kind": "section", **asdict(section)}


def span_line(span: SpanRecord) -> dict[str, Any]:
    """A span as the ledger writes it."""
    return {"v": LEDGER_VERSION, "kind": "span", **asdict(span)}
