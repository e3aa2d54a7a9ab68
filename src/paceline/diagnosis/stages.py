"""What bounds each stage, and which stage bounds the step."""

from collections.abc import Mapping
from functools import partial

from paceline.diagnosis.results import Bottleneck, Evidence, Kind, Source, StageDiagnosis
from paceline.diagnosis.run_records import RankStep, RunRecords
from paceline.types import CAUSES, Cause

NATURE: Mapping[str, Cause] = {
    "data": "data",
    "rollout": "memory",  # decoding reads every weight for one token per sample
    "tools": "queue",
    "reward": "queue",
    "old_logprob": "compute",
    "ref_logprob": "compute",
    "values": "compute",
    "advantage": "scheduling",
    "update_critic": "compute",
    "update_actor": "compute",
    "sync": "communication",
    "checkpoint": "queue",
    "eval": "memory",
    "idle": "queue",
}
"""What bounds a stage as a rule, where nothing measured it."""

_STATED_SHARE = 0.01
"""Spans that state their cause say nothing of a stage of which they are less than this share."""


def diagnose_stages(run: RunRecords, step_s: float) -> tuple[StageDiagnosis, ...]:
    """Every stage that ran, in order of its seconds."""
    names = {
        name for steps in run.ranks.values() for step in run.steps for name in steps[step].section.stages
    }
    found = [_diagnose_stage(run, name, step_s) for name in names]
    return tuple(sorted(found, key=lambda stage: -stage.seconds))


def bottleneck_of(stages: tuple[StageDiagnosis, ...]) -> Bottleneck | None:
    """The longest stage; None where no stage was recorded."""
    if not stages:
        return None
    first = stages[0]
    share = Evidence("share", first.share, "share")
    return Bottleneck(
        first.stage, first.kind, first.seconds, (share, *first.evidence), first.source != "nature"
    )


def _diagnose_stage(run: RunRecords, stage: str, step_s: float) -> StageDiagnosis:
    per_step = run.per_step(lambda step: step.stage_s(stage))
    seconds = sum(per_step) / len(per_step)
    cells, source = _cells(run, stage, seconds)
    kind = _kind(run, stage, cells)
    return StageDiagnosis(
        stage=stage,
        seconds=seconds,
        share=seconds / step_s if step_s else 0.0,
        kind=kind,
        source=source,
        cells=cells,
        evidence=_evidence(run, stage, seconds, cells),
    )


def _cells(run: RunRecords, stage: str, seconds: float) -> tuple[dict[str, float] | None, Source]:
    """Seconds per step by cause, scaled to the stage's own time: from profiled steps, else from spans that state their
    cause, the rest of the stage being what such a stage usually is."""
    measured = [steps[step][stage] for steps in run.causes.values() for step in steps if stage in steps[step]]
    total = sum(sum(cells.values()) for cells in measured)
    if total > 0:
        sums = {cause: sum(cells.get(cause, 0.0) for cells in measured) for cause in CAUSES}
        return {cause: value / total * seconds for cause, value in sums.items()}, "causes"
    cells: dict[str, float] = {
        cause: _mean(run.per_step(partial(_stated, stage=stage, cause=cause))) for cause in CAUSES
    }
    stated = sum(cells.values())
    if stated < _STATED_SHARE * seconds or not stated:
        return None, "nature"
    cells[_nature(run, stage)] += max(0.0, seconds - stated)
    return cells, "spans"


def _stated(step: RankStep, stage: str, cause: str) -> float:
    return sum(span.self_s for span in step.spans if span.stage == stage and span.cause == cause)


def _kind(run: RunRecords, stage: str, cells: Mapping[str, float] | None) -> Kind:
    if cells is None:
        return _nature(run, stage)
    return max(CAUSES, key=lambda cause: cells[cause])


def _nature(run: RunRecords, stage: str) -> Cause:
    """What such a stage usually is; a reward that computes on the device is bound as a model's pass is, and so is an
    evaluation of a supervised run, which generates nothing."""
    if stage == "eval" and run.setting("schedule.name") == "sft":
        return "compute"
    if stage == "reward" and _mean(run.per_step(lambda step: _flops(step, stage))):
        return "compute"
    return NATURE.get(stage, "scheduling")


def _evidence(
    run: RunRecords, stage: str, seconds: float, cells: Mapping[str, float] | None
) -> tuple[Evidence, ...]:
    found = [Evidence("seconds", seconds, "s")]
    if cells is not None:
        found += [Evidence(f"cell_{cause}", value, "s") for cause, value in cells.items() if value > 0]
    for name in ("tflops", "mfu"):
        if (value := run.mean_metric(f"{name}/{stage}")) is not None:
            found.append(Evidence(name, value, "TFLOP/s" if name == "tflops" else "share"))
    tokens = _mean(run.per_step(lambda step: _tokens(step, stage)))
    if tokens:
        found.append(Evidence("tokens", tokens, ""))
        if seconds > 0:
            found.append(Evidence("tokens_per_s", tokens / seconds, ""))
    if stage == "update_actor" and (passes := run.mean_metric("micro_batches")) is not None:
        found.append(Evidence("passes", passes, ""))
    if stage == "rollout" and (running := run.mean_metric("rollout/mean_running")) is not None:
        found.append(Evidence("mean_running", running, ""))
    return tuple(found)


def _tokens(step: RankStep, stage: str) -> float:
    record = step.section.stages.get(stage)
    return record.tokens if record is not None else 0.0


def _flops(step: RankStep, stage: str) -> float:
    record = step.section.stages.get(stage)
    return record.flops if record is not None else 0.0


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
