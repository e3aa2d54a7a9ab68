"""Idle time by what is waited for."""

from paceline.diagnosis.estimates import Estimate, cost_of
from paceline.diagnosis.passes import UPDATE_STAGES
from paceline.diagnosis.ranks import find_straggler, link_cost
from paceline.diagnosis.results import Finding, Wait, WaitKind
from paceline.diagnosis.run_records import RunRecords
from paceline.diagnosis.waiting_costs import host_between_passes, stage_cost

_BY_FINDING: dict[str, tuple[WaitKind, str]] = {
    "long_tail": ("longest_sample", "rollout"),
    "slow_reward": ("reward", "reward"),
    "slow_loader": ("input", "data"),
}


def waits_of(run: RunRecords, costs: tuple[Finding, ...], step_s: float) -> tuple[Wait, ...]:
    """Every wait that took time, the longest first."""
    found: list[tuple[WaitKind, str, Estimate]] = [
        (*_BY_FINDING[one.id], Estimate(one.seconds, one.low, one.high))
        for one in costs
        if one.id in _BY_FINDING
    ]
    found.append(("checkpoint", "checkpoint", stage_cost(run, "checkpoint")))
    if (late := find_straggler(run)) is not None:
        found.append(("slow_rank", "idle", late.wait))
        found.append(("weights", "sync", link_cost(run)))
    found.append(("host", "update_actor", _profiled_host(run) or _host(run)))
    waits = [
        Wait(kind, stage, wait.value, wait.low, wait.high, wait.value / step_s if step_s else 0.0)
        for kind, stage, wait in found
        if wait.value > 0.0
    ]
    return tuple(sorted(waits, key=lambda wait: -wait.seconds))


def _profiled_host(run: RunRecords) -> Estimate | None:
    """Scheduling in profiled steps, scaled to the length of the others: nothing runs and the host prepares it. None
    without any. What a checkpoint or another rank holds up is told by itself."""
    scaled = run.scaled_causes()
    steps = [
        [
            sum(
                cells.get("scheduling", 0.0)
                for stage, cells in by_step[step].items()
                if stage not in ("checkpoint", "idle")
            )
            for by_step in scaled.values()
            if step in by_step
        ]
        for step in run.profiled
    ]
    seconds = [sum(by_rank) / len(by_rank) for by_rank in steps if by_rank]
    return cost_of(seconds) if any(seconds) else None


def _host(run: RunRecords) -> Estimate:
    """The host between passes (on a CPU), and time of the step in no span. An imported run's is unknown."""
    if run.is_imported:
        return Estimate(0.0, 0.0, 0.0)
    loose = cost_of(run.per_step(lambda step: step.section.unaccounted_s))
    if run.has_device:
        return loose
    between = host_between_passes(run, UPDATE_STAGES)
    return Estimate(between.value + loose.value, between.low + loose.low, between.high + loose.high)
