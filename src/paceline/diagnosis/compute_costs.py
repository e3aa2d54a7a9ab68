"""Findings about passes of the model: computed more than needed, in too many pieces, or held up between them."""

import math

from paceline.diagnosis.catalog import finding
from paceline.diagnosis.estimates import Estimate, PassTimes, cost_of
from paceline.diagnosis.passes import (
    SCORE_STAGES,
    UPDATE_STAGES,
    all_passes,
    has_enough_repeated,
    named_s,
    own_s,
    pass_times,
    passes_of,
)
from paceline.diagnosis.results import Finding
from paceline.diagnosis.run_records import RankStep, RunRecords
from paceline.diagnosis.waiting_costs import host_between_passes, stage_cost

_OVERHEAD_SHARE = 0.05
"""Micro-batches are large enough when what each costs whatever its size is this share of it."""

_SHARING_OVERHEAD = 0.19
"""What a position costs more with shared prompts; config/decisions.py says how it was measured."""

RECOMPUTED = {"all": 1.0, "every_k": 0.5, "selective": 0.2}
"""Share of a forward pass that is done again, by train.gradient_checkpointing."""


def small_micro_batches(run: RunRecords, step_s: float) -> Finding | None:
    """What micro-batches cost whatever their size, beyond as many as would make that a twentieth of their time."""
    passes = all_passes(run, "update_actor")
    times = pass_times(passes)
    if times is None or not times.is_separable or times.fixed_s == 0.0:
        return None
    per_step = len(passes) / len(run.steps) / len(run.ranks)
    tokens = sum(one.slots for one in passes) / len(passes)
    updates = max(1.0, run.mean_metric("updates/applied") or 1.0)
    enough = _enough_slots(times, tokens * per_step / updates)
    needed = updates * max(1.0, math.ceil(tokens * per_step / updates / enough))
    if per_step <= needed:
        return None
    # as a share of what passes took, so that a machine that is slower than its median counts in full
    seconds = sum(one.seconds for one in passes) / len(run.steps) / len(run.ranks)
    expected = times.fixed_s + times.per_slot_s * tokens
    scale = seconds / per_step / expected * (per_step - needed)
    error = 1.96 * times.fixed_error_s
    low, high = max(0.0, times.fixed_s - error), min(expected, times.fixed_s + error)
    cost = _not_hidden(run, Estimate(times.fixed_s, low, high).scaled(scale))
    budget = max(256, 2 ** math.ceil(math.log2(enough)))
    values: dict[str, float | str] = {"count": per_step, "tokens": tokens, "overhead": times.fixed_s}
    if budget > (run.setting("batch.token_budget") or 0):
        values["budget"] = int(budget)
    return finding("small_micro_batches", cost, values)


def _enough_slots(times: PassTimes, per_update: float) -> float:
    """Slots from which on a micro-batch's fixed cost is small beside the rest; at most those of a whole update."""
    if times.per_slot_s == 0.0:
        return per_update
    return min(per_update, (1 / _OVERHEAD_SHARE - 1) * times.fixed_s / times.per_slot_s)


def _not_hidden(run: RunRecords, cost: Estimate) -> Estimate:
    """On a device the host runs ahead: only what is left when the update has waited for the device was a cost."""
    if not run.has_device:
        return cost
    waited = sum(run.per_step(lambda step: own_s(step, "update_actor"))) / len(run.steps)
    return Estimate(*(max(0.0, part - waited) for part in (cost.value, cost.low, cost.high)))


def padding(run: RunRecords, step_s: float) -> Finding | None:
    """The part of passes that computes slots no token of a sample takes."""
    padded, slots = run.mean_metric("tokens/padding"), run.mean_metric("tokens/laid_out")
    if not padded or not slots:
        return None
    share = padded / slots
    stages = [stage for stage in (*UPDATE_STAGES, *SCORE_STAGES) if all_passes(run, stage)]
    fixed = {stage: _fixed_s(run, stage) for stage in stages}

    def wasted(step: RankStep) -> float:
        by_size = 0.0
        for stage in stages:
            passes = passes_of(step, stage)
            by_size += max(0.0, sum(one.seconds for one in passes) - fixed[stage] * len(passes))
        return share * by_size

    cost = cost_of(run.per_step(wasted))
    if not stages and run.is_imported:
        cost = stage_cost(run, "update_actor").scaled(share)
    return finding("padding", cost, {"padding_share": share})


def _fixed_s(run: RunRecords, stage: str) -> float:
    times = pass_times(all_passes(run, stage))
    return times.fixed_s if times is not None and times.is_separable else 0.0


def new_shapes(run: RunRecords, step_s: float) -> Finding | None:
    """What passes of new shapes take more than passes of their size whose shape was met before."""
    excess: list[float] = []
    usable = [
        (stage, times)
        for stage in (*UPDATE_STAGES, *SCORE_STAGES)
        if (passes := all_passes(run, stage))
        and has_enough_repeated(passes)
        and (times := pass_times(passes)) is not None
    ]
    if not usable:
        return None
    for steps in run.ranks.values():
        for step in run.steps:
            for stage, times in usable:
                met = [one for one in passes_of(steps[step], stage) if one.is_new]
                excess += [one.seconds - times.fixed_s - times.per_slot_s * one.slots for one in met]
    if not excess:
        return None
    count = len(excess) / len(run.steps) / len(run.ranks)
    each = cost_of(excess)
    return finding("new_shapes", each.scaled(count), {"count": count, "each": each.value})


def shapes_are_always_new(run: RunRecords) -> bool:
    """Whether passes had shapes of their own nearly always, so that nothing can be compared."""
    passes = all_passes(run, "update_actor")
    return len(passes) > 0 and not has_enough_repeated(passes) and any(one.is_new for one in passes)


def sizes_are_alike(run: RunRecords) -> bool:
    """Whether micro-batches differ too little in size to tell what each costs whatever its size."""
    passes = all_passes(run, "update_actor")
    times = pass_times(passes)
    return times is not None and not times.is_separable and len(passes) > 2 * len(run.steps) * len(run.ranks)


def host_sync(run: RunRecords, step_s: float) -> Finding | None:
    """What holds an update up between its passes: by the host's clock on a CPU, by a profiled step on a device, where
    only time that the device stood idle counts."""
    if run.has_device:
        return _idle_device(run)
    stage = max(UPDATE_STAGES, key=lambda name: host_between_passes(run, [name]).value)
    return finding("host_sync", host_between_passes(run, [stage]), {"where": stage}, stage)


def _idle_device(run: RunRecords) -> Finding | None:
    seconds = [
        steps[step].get("update_actor", {}).get("scheduling", 0.0)
        for steps in run.causes.values()
        for step in run.profiled
        if step in steps
    ]
    if not seconds:
        return None
    return finding("host_sync", cost_of(seconds), {"where": "update_actor"})


def redundant_logprob(run: RunRecords, step_s: float) -> Finding | None:
    """A pass for old log-probs that the update, or the engine that sampled, knows already."""
    cost = stage_cost(run, "old_logprob")
    if cost.value == 0.0 or not _old_logprobs_are_known(run):
        return None
    return finding("redundant_logprob", cost, {"share": cost.value / step_s if step_s else 0.0})


def _old_logprobs_are_known(run: RunRecords) -> bool:
    if run.is_imported:
        return run.mean_metric("updates/applied") == 1.0
    prompts, size = run.setting("batch.num_prompts"), run.setting("batch.mini_batch_prompts")
    one_update = run.setting("batch.num_epochs") == 1 and size in (None, prompts)
    return one_update or run.setting("rollout.engine") == "native"


def recompute(run: RunRecords, step_s: float) -> Finding | None:
    """Forward passes done again by gradient checkpointing."""
    setting = run.setting("train.gradient_checkpointing")
    share = RECOMPUTED.get(str(setting))
    if share is None:
        return None
    if setting == "every_k":
        share = 1.0 / (run.setting("train.checkpoint_every") or 2)
    forward = cost_of(run.per_step(lambda step: named_s(step, "update_actor", "forward")))
    if (
        run.has_device
    ):  # spans of passes do not wait for the device; forward, its repetition and backward are 1 : 1 : 2
        forward = stage_cost(run, "update_actor").scaled(1 / (3 + share))
    cost = forward.scaled(share)
    return finding(
        "recompute", Estimate(cost.value, 0.6 * cost.low, 1.1 * cost.high), {"setting": str(setting)}
    )


def repeated_prompts(run: RunRecords, step_s: float) -> Finding | None:
    """Prompts computed with every sample of their group, where computing them once would pay. Supervised rows have no
    group."""
    if run.setting("schedule.name") == "sft":
        return None
    prompt, response = run.mean_metric("tokens/prompt"), run.mean_metric("tokens/response")
    group, effective = run.setting("batch.num_samples"), run.mean_metric("tokens/effective_share")
    if not prompt or not response or not group or effective is None or effective > 1.001:
        return None
    shared = prompt / group + response
    saved = 1.0 - (1.0 + _SHARING_OVERHEAD) * shared / (prompt + response)
    if saved <= 0.0 or run.setting("batch.layout") != "packed":
        return None
    return finding("repeated_prompts", stage_cost(run, "update_actor").scaled(saved), {})


def zero_advantage(run: RunRecords, step_s: float) -> Finding | None:
    """Samples whose gradient is exactly zero and that are computed all the same."""
    groups, prompts = run.mean_metric("groups/zero_signal"), run.setting("batch.num_prompts")
    in_loss = run.setting("algorithm.kl_coefficient") and run.setting("algorithm.kl_placement") == "loss"
    if not groups or not prompts or in_loss or run.setting("algorithm.entropy_coefficient"):
        return None
    if run.setting("batch.skip_zero_advantage") is not False:
        return None
    count = groups * (run.setting("batch.num_samples") or 1)
    cost = stage_cost(run, "update_actor").scaled(min(1.0, groups / prompts))
    return finding("zero_advantage", cost, {"count": count})


def memory_retries(run: RunRecords, step_s: float) -> Finding | None:
    """Mini-batches begun again: each lost between nothing and all of its passes."""
    count = run.mean_metric("memory/out_of_memory_retries")
    if not count:
        return None
    updates = max(1.0, run.mean_metric("updates/applied") or 1.0)
    each = stage_cost(run, "update_actor").value / (updates + count)
    return finding("memory_retries", Estimate(count * each / 2, 0.0, count * each), {"count": count})
