"""Every finding a diagnosis can make: where it lies and which cause it is. A finding without an entry is refused."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.diagnosis.estimates import Estimate
from paceline.diagnosis.results import Finding
from paceline.types import Cause


@dataclass(frozen=True, slots=True)
class FindingKind:
    """Stage and cause of a kind of finding; detectors may name another stage."""

    stage: str
    cause: Cause


FINDINGS: Mapping[str, FindingKind] = {
    "slow_reward": FindingKind("reward", "queue"),
    "reward_model": FindingKind("reward", "compute"),
    "slow_rank": FindingKind("idle", "queue"),
    "token_imbalance": FindingKind("idle", "queue"),
    "uneven_ranks": FindingKind("idle", "queue"),
    "slow_disk": FindingKind("checkpoint", "queue"),
    "checkpoint_copy": FindingKind("checkpoint", "memory"),
    "small_micro_batches": FindingKind("update_actor", "scheduling"),
    "padding": FindingKind("update_actor", "compute"),
    "long_tail": FindingKind("rollout", "queue"),
    "host_sync": FindingKind("update_actor", "scheduling"),
    "slow_loader": FindingKind("data", "data"),
    "new_shapes": FindingKind("update_actor", "scheduling"),
    "slow_link": FindingKind("sync", "communication"),
    "redundant_logprob": FindingKind("old_logprob", "compute"),
    "preemption": FindingKind("rollout", "compute"),
    "recompute": FindingKind("update_actor", "compute"),
    "repeated_prompts": FindingKind("update_actor", "compute"),
    "zero_advantage": FindingKind("update_actor", "compute"),
    "frequent_eval": FindingKind("eval", "compute"),
    "memory_retries": FindingKind("update_actor", "memory"),
    "weight_sync": FindingKind("sync", "memory"),
    "unaccounted": FindingKind("unaccounted", "scheduling"),
    "drift": FindingKind("step", "scheduling"),
}
"""By id."""


def finding(id: str, cost: Estimate, values: Mapping[str, float | str], stage: str | None = None) -> Finding:
    """A finding of a known kind. Raises `KeyError` for an id without an entry."""
    kind = FINDINGS[id]
    return Finding(id, stage or kind.stage, kind.cause, cost.value, cost.low, cost.high, dict(values))
