"""All costs of a run, and those of them that stand out."""

from collections.abc import Callable

from paceline.diagnosis import compute_costs, waiting_costs
from paceline.diagnosis.results import Finding
from paceline.diagnosis.run_records import RunRecords

ALARM_SHARE = 0.1
"""A cost stands out from this share of a step on, if its interval does not reach zero."""

Detector = Callable[[RunRecords, float], Finding | None]
"""(a run, its seconds per step) -> what one kind of cost comes to; None where it cannot occur or be known."""

DETECTORS: tuple[Detector, ...] = (
    waiting_costs.slow_reward,
    waiting_costs.slow_loader,
    waiting_costs.slow_disk,
    waiting_costs.checkpoint_copy,
    waiting_costs.long_tail,
    waiting_costs.preemption,
    waiting_costs.slow_rank,
    waiting_costs.slow_link,
    waiting_costs.frequent_eval,
    waiting_costs.weight_sync,
    waiting_costs.unaccounted,
    waiting_costs.drift,
    compute_costs.small_micro_batches,
    compute_costs.padding,
    compute_costs.new_shapes,
    compute_costs.host_sync,
    compute_costs.redundant_logprob,
    compute_costs.recompute,
    compute_costs.repeated_prompts,
    compute_costs.zero_advantage,
    compute_costs.memory_retries,
)
"""One per kind of cost."""


def costs_of(run: RunRecords, step_s: float) -> tuple[Finding, ...]:
    """Every cost that is not nothing, the largest first, however small."""
    found = [one for detect in DETECTORS if (one := detect(run, step_s)) is not None and one.seconds > 0.0]
    return tuple(sorted(found, key=lambda one: -one.seconds))


def standing_out(costs: tuple[Finding, ...], step_s: float) -> tuple[Finding, ...]:
    """The costs that are findings."""
    return tuple(one for one in costs if one.seconds >= ALARM_SHARE * step_s and one.low > 0.0)
