"""Ranks beside one another: who waits for whom, and what crosses the links between them.

A collective ends for all at once, so the rank that comes last spends the least time in it. What the others spend more
is waiting for it, and what even the last rank spends is the exchange itself.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.diagnosis.estimates import Estimate, cost_of
from paceline.diagnosis.results import RankDiagnosis
from paceline.diagnosis.run_records import RankStep, RunRecords
from paceline.types import STAGES

PERSISTENT = 0.75
"""A rank that the others wait for in at least this share of steps is slow; else its share of the work was larger."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that is waited for most: seconds per step the others wait for it, in what share of steps it is the last,
    the stage it is behind in, and its tokens over the mean of ranks."""

    rank: int
    wait: Estimate
    persistence: float
    stage: str
    tokens_over_mean: float


def waiting_s(step: RankStep) -> float:
    """Seconds a rank waits where ranks meet."""
    return sum(span.self_s for span in step.spans if span.stage == "idle" and span.cause == "queue")


def exchange_s(step: RankStep) -> float:
    """Seconds a rank is in exchanges, waiting for the last rank included."""
    return sum(span.self_s for span in step.spans if span.cause == "communication")


def exchanges(run: RunRecords) -> list[dict[int, float]]:
    """Seconds in exchanges by rank, step by step; of profiled steps where there are causes."""
    if profiled := _profiled_exchanges(run):
        return profiled
    return [{rank: exchange_s(steps[step]) for rank, steps in run.ranks.items()} for step in run.steps]


def _profiled_exchanges(run: RunRecords) -> list[dict[int, float]]:
    """Exposed communication by rank in profiled steps, scaled to the length of the others."""
    scaled = run.scaled_causes()
    found = [
        {
            rank: sum(cells.get("communication", 0.0) for cells in steps.get(step, {}).values())
            for rank, steps in scaled.items()
        }
        for step in run.profiled
    ]
    return found if any(sum(by_rank.values()) for by_rank in found) else []


def link_cost(run: RunRecords) -> Estimate:
    """Seconds per step that exchanges take the rank that comes last to them."""
    return cost_of(min(by_rank.values()) for by_rank in exchanges(run) if by_rank)


def exchange_stage(run: RunRecords) -> str:
    """The stage most of the exchange lies in."""
    totals: dict[str, float] = defaultdict(float)
    for steps in run.ranks.values():
        for step in run.steps:
            for span in steps[step].spans:
                if span.cause == "communication":
                    totals[span.stage] += span.self_s
    for steps_of in run.causes.values():
        for cells in steps_of.values():
            for stage, by_cause in cells.items():
                totals[stage] += by_cause.get("communication", 0.0)
    return max(totals, key=lambda stage: totals[stage]) if totals else "sync"


def find_straggler(run: RunRecords) -> Straggler | None:
    """The rank the others wait for most; None with one rank."""
    if len(run.ranks) < 2:
        return None
    waits = [_waits(run, step) for step in run.steps]
    last = Counter(min(by_rank, key=lambda rank: by_rank[rank]) for by_rank in waits)
    rank, count = last.most_common(1)[0]
    lost = [_lost(by_rank) for by_rank in waits]
    return Straggler(
        rank, cost_of(lost), count / len(waits), _late_stage(run, rank), _tokens_over_mean(run, rank)
    )


def _waits(run: RunRecords, step: int) -> dict[int, float]:
    return {rank: waiting_s(steps[step]) + exchange_s(steps[step]) for rank, steps in run.ranks.items()}


def _lost(by_rank: Mapping[int, float]) -> float:
    """What the other ranks wait more than the one that waits least, mean over them."""
    least = min(by_rank.values())
    return sum(wait - least for wait in by_rank.values()) / (len(by_rank) - 1)


def _late_stage(run: RunRecords, rank: int) -> str:
    """The stage in which a rank is furthest behind the mean of the others, exchanges left out."""
    behind = {
        stage: _mean_busy(run, rank, stage) - _others(run, rank, stage) for stage in STAGES if stage != "idle"
    }
    return max(behind, key=lambda stage: behind[stage])


def _mean_busy(run: RunRecords, rank: int, stage: str) -> float:
    return sum(_busy_in(run.ranks[rank][step], stage) for step in run.steps) / len(run.steps)


def _others(run: RunRecords, rank: int, stage: str) -> float:
    others = [other for other in run.ranks if other != rank]
    return sum(_mean_busy(run, other, stage) for other in others) / len(others)


def _busy_in(step: RankStep, stage: str) -> float:
    exchanged = sum(span.self_s for span in step.named(stage) if span.cause == "communication")
    return step.stage_s(stage) - exchanged


def _tokens_over_mean(run: RunRecords, rank: int) -> float:
    """Of the stages that count tokens together."""
    tokens = {one: _total(run, one, "tokens") for one in run.ranks}
    mean = sum(tokens.values()) / len(tokens)
    return tokens[rank] / mean if mean else 1.0


def _total(run: RunRecords, rank: int, what: str, stage: str | None = None) -> float:
    total = 0.0
    for step in run.steps:
        stages = run.ranks[rank][step].section.stages
        for name, record in stages.items():
            if stage is None or name == stage:
                total += record.tokens if what == "tokens" else record.flops
    return total


def diagnose_ranks(run: RunRecords) -> tuple[RankDiagnosis, ...]:
    """Every rank's means per step."""
    count = len(run.steps)
    wall, wait = {}, {}
    for rank, steps in run.ranks.items():
        wall[rank] = sum(steps[step].wall_s for step in run.steps) / count
        wait[rank] = sum(waiting_s(steps[step]) for step in run.steps) / count
    busy = {rank: wall[rank] - wait[rank] for rank in run.ranks}
    found = []
    for rank in run.ranks:
        others = [busy[other] for other in run.ranks if other != rank]
        found.append(
            RankDiagnosis(
                rank=rank,
                wall_s=wall[rank],
                busy_s=busy[rank],
                idle_s=wait[rank],
                tokens=_total(run, rank, "tokens", "update_actor") / count,
                flops=_total(run, rank, "flops", "update_actor") / count,
                excess_s=busy[rank] - sum(others) / len(others) if others else 0.0,
            )
        )
    return tuple(found)
