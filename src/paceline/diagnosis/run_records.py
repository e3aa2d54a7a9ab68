"""Everything a diagnosis reads of a run's folder, and which of its steps count.

The first step of every process is warm-up (compilation, caches, allocators), and a step under the profiler is slower
than others: neither is in a statistic of time.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import ConfigError
from paceline.config.yaml_scalars import parse_yaml
from paceline.telemetry.causes.records import UNACCOUNTED, read_causes
from paceline.telemetry.jsonl import decode_number, read_lines
from paceline.telemetry.metrics import read_metrics
from paceline.telemetry.records import BackgroundRecord, RankLedger, SectionRecord, SpanRecord, read_ledger

FOREIGN_FILE = "foreign_metrics.jsonl"
"""Where importers keep another framework's own metrics."""


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step of one rank: its section, the spans kept of it, and the background work that ran during it."""

    section: SectionRecord
    spans: tuple[SpanRecord, ...]
    background: tuple[BackgroundRecord, ...]

    @property
    def wall_s(self) -> float:
        """Wall seconds."""
        return self.section.wall_s

    def stage_s(self, stage: str) -> float:
        """Self-seconds of a stage; 0 where it did not run."""
        record = self.section.stages.get(stage)
        return record.self_s if record is not None else 0.0

    def named(self, stage: str, *names: str) -> list[SpanRecord]:
        """Spans kept of a stage, of these names (none given: all)."""
        return [span for span in self.spans if span.stage == stage and (not names or span.name in names)]


@dataclass(frozen=True, slots=True)
class RunRecords:
    """A run's folder in memory: `ranks[r][step]`, and `metrics[step]` with what was recorded of it."""

    name: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    ranks: Mapping[int, Mapping[int, RankStep]]
    metrics: Mapping[int, Mapping[str, float]]
    foreign: Mapping[int, Mapping[str, float]]
    causes: Mapping[int, Mapping[int, Mapping[str, Mapping[str, float]]]]
    """Rank to step to stage to cause to seconds, of profiled steps."""
    steps: tuple[int, ...]
    """Steps that time statistics use, present on every rank."""
    warmup: tuple[int, ...]
    profiled: tuple[int, ...]
    """Steps with causes."""
    num_slowed: int = 0
    """Steps left out because they ran under the profiler, also where it was lost; of an imported run none is."""

    @property
    def is_imported(self) -> bool:
        """Whether another framework wrote the run."""
        return self.summary.get("status") == "imported"

    @property
    def has_device(self) -> bool:
        """Whether stages run on a device, so that spans measure when the host issued work and not the work."""
        return self.environment.get("device") in ("cuda", "npu")

    def setting(self, name: str) -> Any:
        """A setting by its dotted name; None when config.yaml lacks it."""
        section, _, key = name.partition(".")
        content = self.config.get(section)
        return content.get(key) if isinstance(content, Mapping) else None

    def per_step(self, figure: Callable[[RankStep], float]) -> list[float]:
        """The mean over ranks of a figure, for every step that counts."""
        return [
            sum(figure(steps[step]) for steps in self.ranks.values()) / len(self.ranks) for step in self.steps
        ]

    def metric(self, name: str) -> list[float]:
        """A metric's values in the steps that count and have it."""
        found = (self.metrics.get(step, {}).get(name) for step in self.steps)
        return [value for value in found if value is not None]

    def mean_metric(self, name: str) -> float | None:
        """The mean of `metric`; None where no step has it."""
        values = self.metric(name)
        return sum(values) / len(values) if values else None

    def scaled_causes(self) -> dict[int, dict[int, dict[str, dict[str, float]]]]:
        """`causes` with every stage's cells scaled from profiled steps, which are slower, to the stage's mean time in
        the steps that count, rank by rank."""
        found = {}
        for rank, steps in self.causes.items():
            timed = [self.ranks[rank][step] for step in self.steps] if rank in self.ranks else []
            scales = {
                stage: _scale([sum(cells.get(stage, {}).values()) for cells in steps.values()], timed, stage)
                for stage in {stage for cells in steps.values() for stage in cells}
            }
            found[rank] = {
                step: {
                    stage: {cause: value * scales[stage] for cause, value in by_cause.items()}
                    for stage, by_cause in cells.items()
                }
                for step, cells in steps.items()
            }
        return found

    def mean_foreign(self, name: str) -> float | None:
        """The same for another framework's metric."""
        values = [self.foreign[step][name] for step in self.steps if name in self.foreign.get(step, {})]
        return sum(values) / len(values) if values else None


def read_run(
    run_dir: Path, ledgers: Sequence[RankLedger] | None = None, only: Collection[int] | None = None
) -> RunRecords:
    """Reads a run's folder, its ledgers unless they are given; time statistics use the steps `only` allows.

    Raises:
        ConfigError: it is no run's folder, or no ledger in it holds a step.
        ValueError: a record is of a version this paceline does not read.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir() or not (run_dir / "config.yaml").is_file():
        rule = "must be the folder of a run, which holds a config.yaml"
        raise ConfigError("run", str(run_dir), rule, zh="须是训练运行的文件夹，其中有 config.yaml")
    ledgers = [ledger for ledger in ledgers or read_ledger(run_dir) if ledger.steps()]
    if not ledgers:
        rule = "its ledger holds no finished step, so there is no time to diagnose"
        raise ConfigError("run", str(run_dir), rule, zh="账本中没有已完成的训练步，没有可诊断的时间")
    config = _mapping(parse_yaml((run_dir / "config.yaml").read_text(encoding="utf-8")))
    causes = _read_causes(run_dir)
    ranks = {ledger.rank: _steps_of(ledger) for ledger in ledgers}
    common = sorted(set.intersection(*(set(steps) for steps in ranks.values())))
    environment, summary = _read_json(run_dir / "env.json"), _read_json(run_dir / "summary.json")
    metrics = {record.step: record.metrics for record in read_metrics(run_dir)}
    profiled = tuple(step for step in common if any(step in steps for steps in causes.values()))
    slowed = {*profiled, *(step for step, values in metrics.items() if values.get("profiled", 0.0) > 0)}
    is_imported = summary.get("status") == "imported"
    warmup = tuple(step for step in common if step in first_steps(ledgers, is_imported))
    used = tuple(
        step
        for step in common
        if step not in warmup and (is_imported or step not in slowed) and (only is None or step in only)
    )
    slow = [step for step in common if step in slowed and step not in (*used, *warmup)] if used else []
    return RunRecords(
        name=str(_mapping(config.get("run")).get("name", run_dir.name)),
        config=config,
        environment=environment,
        summary=summary,
        ranks=ranks,
        metrics=metrics,
        foreign=_read_foreign(run_dir / FOREIGN_FILE),
        causes=causes,
        steps=used or tuple(common),
        warmup=warmup if used else (),
        profiled=profiled,
        num_slowed=len(slow),
    )


def _steps_of(ledger: RankLedger) -> dict[int, RankStep]:
    counting = {id(section) for section in ledger.steps()}
    found: dict[int, RankStep] = {}
    for process in ledger.processes:
        spans: dict[int | None, list[SpanRecord]] = {}
        for span in process.spans:
            spans.setdefault(span.step, []).append(span)
        for section in process.sections:
            if section.step is None or id(section) not in counting:
                continue
            during = [
                work
                for work in process.background
                if work.end_s > section.start_s and work.start_s < section.end_s
            ]
            found[section.step] = RankStep(section, tuple(spans.get(section.step, ())), tuple(during))
    return found


def first_steps(ledgers: Sequence[RankLedger], is_imported: bool) -> set[int]:
    """The first step of every process; of an imported log only a run's own first step can be known to be one."""
    if is_imported:
        return {1}
    return {
        next(section.step for section in process.sections if section.step is not None)
        for ledger in ledgers
        for process in ledger.processes
        if any(section.step is not None for section in process.sections)
    }


def _scale(profiled_s: Sequence[float], timed: Sequence[RankStep], stage: str) -> float:
    """The mean time of a stage in `timed` steps over that in profiled ones; 0 where no timed step had it."""
    total = sum(profiled_s)
    if not timed or total <= 0.0:
        return 0.0
    if stage == UNACCOUNTED:
        mean_s = sum(step.section.unaccounted_s for step in timed) / len(timed)
    else:
        mean_s = sum(step.stage_s(stage) for step in timed) / len(timed)
    return mean_s / (total / len(profiled_s))


def _read_causes(run_dir: Path) -> dict[int, dict[int, dict[str, dict[str, float]]]]:
    """Cells by rank, step and stage."""
    return {
        rank.rank: {
            step.step: {
                stage: {str(cause): value for cause, value in cells.items()}
                for stage, cells in step.cells.items()
            }
            for step in rank.steps
        }
        for rank in read_causes(run_dir)
    }


def _read_foreign(path: Path) -> dict[int, dict[str, float]]:
    if not path.exists():
        return {}
    return {
        record["step"]: {name: decode_number(value) for name, value in record["metrics"].items()}
        for record in read_lines(path)
        if record is not None
    }


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        return _mapping(json.loads(path.read_text(encoding="utf-8")))
    except ValueError:  # half-written by a killed process: what it would have said stays unknown
        return {}


def _mapping(content: Any) -> Mapping[str, Any]:
    return content if isinstance(content, Mapping) else {}
