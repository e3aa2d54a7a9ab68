"""What the ranks of a run know between them: a step's metrics reduced over all, and where each rank's time went."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.config import Config
from paceline.engine.meeting import meet
from paceline.engine.mesh import RankMesh
from paceline.model.loading import CausalModel
from paceline.schedules.display import Display
from paceline.schedules.run_folder import RunFolder
from paceline.schedules.run_state import RunState
from paceline.telemetry.flops import mfu, mfu_alarm, throughput
from paceline.telemetry.hardware import known_peak_tflops
from paceline.telemetry.ledger import Ledger, SectionTotals
from paceline.telemetry.metrics import MetricAccumulator, MetricLog, read_metrics, reduce_over_ranks
from paceline.types import Stage

BALANCED_STAGE: Stage = "update_actor"
"""The stage whose division over ranks is a plan's doing."""


class AnyRun(Protocol):
    """What is asked of a run here, whichever its schedule."""

    config: Config
    mesh: RankMesh
    ledger: Ledger
    log: MetricLog | None
    display: Display
    folder: RunFolder
    model: CausalModel
    state: RunState


def reduce_metrics(run: AnyRun, metrics: MetricAccumulator) -> dict[str, float]:
    """A step's metrics by their declared reductions over every rank's values, the same on all ranks."""
    if run.mesh.world_size == 1:
        return metrics.reduce()
    meet(run.mesh, run.ledger, "the others' metrics")
    with run.ledger.span("idle", "exchange metrics", cause="communication"):
        return reduce_over_ranks(run.mesh.gather_objects(metrics))


def write_metrics(run: AnyRun, step: int, values: Mapping[str, float]) -> None:
    """Writes metrics.jsonl where this rank does."""
    if run.log is not None:
        run.log.record(step, values)


def restore_lost_metrics(run: AnyRun) -> None:
    """After a resume: the checkpointed step's metrics, if the process died between saving and recording them."""
    if run.log is None:
        return
    recorded = {record.step for record in read_metrics(run.folder.path)}
    if run.state.step not in recorded:
        values = {name: float(value) for name, value in run.state.figures["step_values"].items()}
        run.log.record(run.state.step, values)


@dataclass(frozen=True, slots=True)
class StepTiming:
    """A finished step's time: its metrics, and seconds as a person is shown them, means over ranks."""

    metrics: Mapping[str, float]
    wall_s: float
    stage_s: Mapping[str, float]


def time_step(run: AnyRun, step: int, num_tokens: float) -> StepTiming:
    """What the ledgers of all ranks say of a finished step; unlike the rest, this differs from run to run.

    `num_tokens` are prompt and response tokens of the step's samples, each counted once.
    """
    own = run.ledger.last_section
    assert own is not None and own.step == step
    meet(run.mesh, run.ledger, "the others' times")
    sections: list[SectionTotals] = run.mesh.gather_objects(own)
    metrics = timing_metrics(sections, num_tokens, _peak_tflops(run))
    for alarm in mfu_alarms(metrics):
        run.display.note(f"  ALARM: {alarm}")
    return StepTiming(metrics, metrics["time/step"], mean_stage_s(sections))


def timing_metrics(
    sections: Sequence[SectionTotals], num_tokens: float, peak_tflops: float | None
) -> dict[str, float]:
    """Times, throughput, FLOP/s and balance of one step from every rank's section of it."""
    metrics = MetricAccumulator()
    for section in sections:
        metrics.add("time/step", section.wall_s)
        metrics.add("time/unaccounted", section.unaccounted_s)
        metrics.add("memory/peak_allocated", section.memory.peak_allocated)
        metrics.add("memory/peak_reserved", section.memory.peak_reserved)
        metrics.add("memory/host_rss", section.memory.host_rss)
    stage_s = mean_stage_s(sections)
    for stage, seconds in stage_s.items():
        metrics.add(f"time/{stage}", seconds)
    wall_s = _mean([section.wall_s for section in sections])
    speed = throughput([int(num_tokens)], wall_s, len(sections))
    metrics.add("throughput/tokens_per_s", speed.tokens_per_s)
    metrics.add("throughput/tokens_per_s_per_device", speed.tokens_per_s_per_device)
    if spent := max(section.stage_s.get("rollout", 0.0) for section in sections):
        generated = sum(section.stage_tokens.get("rollout", 0) for section in sections)
        metrics.add("throughput/generated_tokens_per_s", generated / spent)
    _record_work(sections, stage_s, wall_s, peak_tflops, metrics)
    if len(sections) > 1:
        _record_balance(sections, metrics)
    return metrics.reduce()


def mean_stage_s(sections: Sequence[SectionTotals]) -> dict[str, float]:
    """Self-seconds by stage, mean over ranks; a rank that was never in a stage counts with 0, so that stages still add
    up to the step."""
    stages = dict.fromkeys(stage for section in sections for stage in section.stage_s)
    return {stage: _mean([section.stage_s.get(stage, 0.0) for section in sections]) for stage in stages}


def _record_work(
    sections: Sequence[SectionTotals],
    stage_s: Mapping[str, float],
    wall_s: float,
    peak_tflops: float | None,
    metrics: MetricAccumulator,
) -> None:
    """FLOP/s per device and MFU of every stage that declared FLOPs, and of the step. Ranks that share samples have
    each declared their part, so nothing counts twice."""
    work = {stage: sum(s.stage_flops.get(stage, 0.0) for s in sections) for stage in stage_s}
    seconds_of = {**stage_s, "step": wall_s}
    for name, flops in {**work, "step": sum(work.values())}.items():
        seconds = seconds_of[name]
        if seconds > 0 and flops:
            metrics.add(f"tflops/{name}", flops / seconds / len(sections) / 1e12)
            if (share := mfu(flops, seconds, len(sections), peak_tflops)) is not None:
                metrics.add(f"mfu/{name}", share)


def _record_balance(sections: Sequence[SectionTotals], metrics: MetricAccumulator) -> None:
    """How much more than the mean the busiest rank has: of the update's tokens and FLOPs, and of time not waited."""
    figures: dict[str, Callable[[SectionTotals], float]] = {
        "balance/tokens_max_over_mean": lambda section: section.stage_tokens.get(BALANCED_STAGE, 0),
        "balance/flops_max_over_mean": lambda section: section.stage_flops.get(BALANCED_STAGE, 0.0),
        "balance/busy_max_over_mean": lambda section: section.wall_s - section.stage_s.get("idle", 0.0),
    }
    for name, figure in figures.items():
        by_rank = [figure(section) for section in sections]
        if mean := _mean(by_rank):
            metrics.add(name, max(by_rank) / mean)
    busy = [section.wall_s - section.stage_s.get("idle", 0.0) for section in sections]
    metrics.add("balance/slowest_rank", busy.index(max(busy)))


def mfu_alarms(values: Mapping[str, float]) -> list[str]:
    """A sentence for every MFU among a step's metrics that cannot be true."""
    shares = {name: value for name, value in values.items() if name.startswith("mfu/")}
    return [f"{name}: {alarm}" for name, value in shares.items() if (alarm := mfu_alarm(value))]


def _peak_tflops(run: AnyRun) -> float | None:
    device = run.model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    dtype = str(run.model.dtype).removeprefix("torch.")
    return known_peak_tflops(name, dtype, run.config.telemetry.peak_tflops)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
