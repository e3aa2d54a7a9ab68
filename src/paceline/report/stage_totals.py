"""Sums of every stage over the steps, and what follows from them: shares, rates, MFU."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from paceline.report.palette import UNACCOUNTED, ordered
from paceline.report.run_data import RunData
from paceline.telemetry.flops import mfu
from paceline.telemetry.hardware import known_peak_tflops
from paceline.telemetry.records import SectionRecord


@dataclass(slots=True)
class StageTotal:
    """Sums of a stage over sections; peaks in bytes."""

    self_s: float = 0.0
    tokens: int = 0
    flops: float = 0.0
    peak_allocated: int = 0
    peak_reserved: int = 0
    host_rss: int = 0


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage in the mean step: seconds, share of the step, tokens, FLOPs, and rates within the stage."""

    stage: str
    seconds: float
    share: float
    tokens: float
    flops: float
    tokens_per_s: float | None
    tflops: float | None
    mfu: float | None


@dataclass(frozen=True, slots=True)
class RankRow:
    """A rank's mean step: seconds busy (neither idle nor unaccounted), in the actor update, and tokens trained on."""

    rank: int
    num_steps: int
    step_s: float
    busy_share: float
    update_actor_s: float
    idle_s: float
    unaccounted_s: float
    update_actor_tokens: float


def stage_totals(sections: Iterable[SectionRecord]) -> dict[str, StageTotal]:
    """Sums by stage, without the unaccounted time."""
    totals: dict[str, StageTotal] = {}
    for section in sections:
        for name, stage in section.stages.items():
            total = totals.setdefault(name, StageTotal())
            total.self_s += stage.self_s
            total.tokens += stage.tokens
            total.flops += stage.flops
            total.peak_allocated = max(total.peak_allocated, stage.peak_allocated)
            total.peak_reserved = max(total.peak_reserved, stage.peak_reserved)
            total.host_rss = max(total.host_rss, stage.host_rss)
    return totals


def peak_of(run: RunData) -> float | None:
    """Peak TFLOP/s of the run's device; None on hardware that neither the table nor the recipe knows."""
    stated = run.setting("telemetry.peak_tflops")
    name, dtype = run.environment.get("device_name"), run.environment.get("dtype")
    return known_peak_tflops(
        None if name is None else str(name), str(dtype), None if stated is None else float(stated)
    )


def stage_rows(run: RunData) -> list[StageRow]:
    """The mean step's stages in the order they run, unaccounted last. They add up to the step."""
    steps = run.timed_steps
    wall = sum(step.wall_s for step in steps)
    if not steps or wall <= 0:
        return []
    peak = peak_of(run)
    totals = stage_totals(steps)
    totals[UNACCOUNTED] = StageTotal(self_s=sum(step.unaccounted_s for step in steps))
    return [_stage_row(name, totals[name], len(steps), wall, peak) for name in ordered(set(totals))]


def _stage_row(name: str, total: StageTotal, num_steps: int, wall: float, peak: float | None) -> StageRow:
    worked = total.self_s > 0
    return StageRow(
        stage=name,
        seconds=total.self_s / num_steps,
        share=total.self_s / wall,
        tokens=total.tokens / num_steps,
        flops=total.flops / num_steps,
        tokens_per_s=total.tokens / total.self_s if worked and total.tokens else None,
        tflops=total.flops / total.self_s / 1e12 if worked and total.flops else None,
        mfu=mfu(total.flops, total.self_s, 1, peak) if worked and total.flops else None,
    )


def rank_rows(rank_steps: Mapping[int, list[SectionRecord]]) -> list[RankRow]:
    """One row per rank that finished a step."""
    return [_rank_row(rank, steps) for rank, steps in rank_steps.items() if steps]


def _rank_row(rank: int, steps: list[SectionRecord]) -> RankRow:
    count = len(steps)
    wall = sum(step.wall_s for step in steps)
    unaccounted = sum(step.unaccounted_s for step in steps)
    idle = sum(stage.self_s for step in steps if (stage := step.stages.get("idle")))
    actor = [stage for step in steps if (stage := step.stages.get("update_actor"))]
    return RankRow(
        rank=rank,
        num_steps=count,
        step_s=wall / count,
        busy_share=(wall - idle - unaccounted) / wall if wall else 0.0,
        update_actor_s=sum(stage.self_s for stage in actor) / count,
        idle_s=idle / count,
        unaccounted_s=unaccounted / count,
        update_actor_tokens=sum(stage.tokens for stage in actor) / count,
    )
