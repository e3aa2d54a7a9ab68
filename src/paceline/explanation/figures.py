"""The figures an explanation is made of, each straight from a run's ledger, metrics or causes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Literal

from paceline.diagnosis.run_records import RankStep, RunRecords
from paceline.types import CAUSES

CauseSource = Literal["profile", "spans", "none"]
"""How causes are known: from steps under the profiler, from what spans state in every step, or not at all."""

WAITS = ("communication", "data", "queue")
"""Causes in which nothing is computed because of something else."""

CHECKPOINT = "checkpoint"
"""The stage that blocks while it saves. It is told by itself, and so in no cause's seconds."""

_RETRIES = "retries"


@dataclass(frozen=True, slots=True)
class Balance:
    """Means per step by rank: token slots of update_actor, and seconds a rank did not wait for others."""

    tokens: Mapping[int, float]
    busy_s: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Means per step over ranks and the steps that count, in seconds; None is what is not known.

    `cause_s` by cause: of a profile all six, scaled to the time of steps without it; of spans those of `WAITS`.
    `uncovered_s` is time of stages that no profiled step had, such as an evaluation, and so in no cause.
    `retries`: how often something was tried again in the whole run.
    """

    step_s: float
    stage_s: Mapping[str, float]
    unaccounted_s: float
    cause_s: Mapping[str, float]
    cause_source: CauseSource
    update_compute_s: float | None
    uncovered_s: float
    balance: Balance | None
    retries: float | None


def figures_of(run: RunRecords) -> RunFigures:
    """The figures of a run's records."""
    names = {
        name for steps in run.ranks.values() for step in run.steps for name in steps[step].section.stages
    }
    stage_s = {name: fmean(run.per_step(partial(RankStep.stage_s, stage=name))) for name in sorted(names)}
    longest_first = sorted(stage_s, key=lambda name: -stage_s[name])
    cause_s, source, update_compute_s = _causes(run, stage_s)
    step_s = fmean(run.per_step(lambda step: step.wall_s))
    unaccounted_s = fmean(run.per_step(lambda step: step.section.unaccounted_s))
    told_s = sum(cause_s.values()) + stage_s.get(CHECKPOINT, 0.0) + unaccounted_s
    return RunFigures(
        step_s=step_s,
        stage_s={name: stage_s[name] for name in longest_first},
        unaccounted_s=unaccounted_s,
        cause_s=cause_s,
        cause_source=source,
        update_compute_s=update_compute_s,
        uncovered_s=max(0.0, step_s - told_s) if source == "profile" else 0.0,
        balance=_balance(run),
        retries=_retries(run),
    )


def stated_s(step: RankStep, cause: str, apart: Collection[str] = (CHECKPOINT,)) -> float:
    """Seconds of a step that its spans say are spent on `cause`, those of stages `apart` left out."""
    stages = step.section.stages.items()
    return sum(record.cause_s.get(cause, 0.0) for name, record in stages if name not in apart)


def states_causes(run: RunRecords) -> bool:
    """Whether any span of the run names a cause. Ledgers of early versions and imported ones hold none."""
    return any(
        stage.cause_s
        for steps in run.ranks.values()
        for step in steps.values()
        for stage in step.section.stages.values()
    )


def _causes(
    run: RunRecords, stage_s: Mapping[str, float]
) -> tuple[dict[str, float], CauseSource, float | None]:
    """Seconds by cause, how they are known, and the compute of update_actor."""
    by_stage = {name: _cells(run, name, seconds) for name, seconds in stage_s.items()}
    if any(cells is not None for cells in by_stage.values()):
        counted = [cells for name, cells in by_stage.items() if cells and name != CHECKPOINT]
        found: dict[str, float] = {cause: sum(cells[cause] for cells in counted) for cause in CAUSES}
        update = by_stage.get("update_actor")
        return found, "profile", None if update is None else update["compute"]
    if not states_causes(run):
        return {}, "none", None
    stated = {cause: fmean(run.per_step(partial(stated_s, cause=cause))) for cause in WAITS}
    return stated, "spans", None


def _cells(run: RunRecords, stage: str, seconds: float) -> dict[str, float] | None:
    """A stage's cells in profiled steps, scaled to its mean time; None where no profiled step has any."""
    measured = [steps[step][stage] for steps in run.causes.values() for step in steps if stage in steps[step]]
    total = sum(sum(cells.values()) for cells in measured)
    if total <= 0:
        return None
    return {cause: sum(cells.get(cause, 0.0) for cells in measured) / total * seconds for cause in CAUSES}


def _balance(run: RunRecords) -> Balance | None:
    if len(run.ranks) < 2:
        return None
    tokens, busy = {}, {}
    for rank, steps in run.ranks.items():
        own = [steps[step] for step in run.steps]
        tokens[rank] = fmean(
            stage.tokens if (stage := step.section.stages.get("update_actor")) is not None else 0.0
            for step in own
        )
        busy[rank] = fmean(step.wall_s - step.stage_s("idle") for step in own)
    return Balance(tokens, busy)


def _retries(run: RunRecords) -> float | None:
    found = [
        value
        for metrics in run.metrics.values()
        for name, value in metrics.items()
        if name.endswith(_RETRIES)
    ]
    if found:
        return sum(found)
    return None if run.is_imported else 0.0
