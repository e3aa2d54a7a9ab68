"""Findings about time in which nothing is done: what a step waits for, and how long."""

from collections.abc import Sequence

from paceline.diagnosis.catalog import finding
from paceline.diagnosis.estimates import Estimate, cost_of, trend
from paceline.diagnosis.passes import own_s, passes_of
from paceline.diagnosis.ranks import PERSISTENT, exchange_stage, find_straggler, link_cost
from paceline.diagnosis.results import UNKNOWN_VALUE, Drift, Finding
from paceline.diagnosis.run_records import RankStep, RunRecords
from paceline.telemetry.records import BackgroundRecord

_DRIFT_SHARE = 0.1
"""A change over the run below this share of a step is no drift."""

_ROUND_LOW = 0.5
"""Least part of the predicted cost of rounds that fewer running samples made necessary."""

_MIN_DRIFT_STEPS = 10
"""Over fewer steps a busy machine looks like a drift."""

_UNEVEN = 1.05
"""A rank has more to do than others from this many times the mean number of tokens on."""


def stage_cost(run: RunRecords, stage: str) -> Estimate:
    """A stage's self-seconds per step."""
    return cost_of(run.per_step(lambda step: step.stage_s(stage)))


def slow_reward(run: RunRecords, step_s: float) -> Finding | None:
    """The wait for rewards after a rollout; a reward that is a model's pass is compute, not a wait."""
    cost = stage_cost(run, "reward")
    values: dict[str, float | str] = {"share": _share(cost, step_s), "per_sample": UNKNOWN_VALUE}
    if any(
        steps[step].section.stages["reward"].flops
        for steps in run.ranks.values()
        for step in run.steps
        if "reward" in steps[step].section.stages
    ):
        sources = run.setting("reward.sources")
        models = [name for name, one in (sources or {}).items() if one.get("kind") in ("model", "judge")]
        source = {"source": models[0]} if models else {}
        return finding("reward_model", cost, {"share": values["share"], **source})
    if samples := samples_per_rank(run):
        values["per_sample"] = cost.value / samples
    if workers := run.setting("task.reward_workers"):
        cores = run.environment.get("cpu", {}).get("num_usable_cores") or 2 * workers
        if cores > workers:
            values["workers"] = int(min(cores, 2 * workers))
    if run.mean_metric("reward/timeouts") and (limit := run.setting("task.reward_timeout_s")):
        values["timeout"] = limit / 2
    return finding("slow_reward", cost, values)


def slow_loader(run: RunRecords, step_s: float) -> Finding | None:
    """The wait for prompts."""
    cost = stage_cost(run, "data")
    return finding("slow_loader", cost, {"share": _share(cost, step_s)})


def slow_disk(run: RunRecords, step_s: float) -> Finding | None:
    """Time of the checkpoint stage in which files were being written. An importer knows the stage alone."""
    cost = cost_of(run.per_step(_disk_wait_s)) if not run.is_imported else stage_cost(run, "checkpoint")
    every = run.setting("checkpoint.every")
    tenfold = {"every_tenfold": 10 * int(every)} if every else {}
    share = _share(cost, step_s)
    return finding("slow_disk", cost, {"share": share, "bandwidth": _bandwidth(run), **tenfold})


def checkpoint_copy(run: RunRecords, step_s: float) -> Finding | None:
    """The rest of the checkpoint stage: copying the state to where it is written from."""
    if run.is_imported:
        return None
    cost = cost_of(run.per_step(lambda step: max(0.0, step.stage_s("checkpoint") - _disk_wait_s(step))))
    every = run.setting("checkpoint.every")
    tenfold = {"every_tenfold": 10 * int(every)} if every else {}
    return finding("checkpoint_copy", cost, {"share": _share(cost, step_s), **tenfold})


def _disk_wait_s(step: RankStep) -> float:
    writes = _writes(step)
    spans = step.named("checkpoint")
    return sum(
        max(0.0, min(span.end_s, write.end_s) - max(span.start_s, write.start_s))
        for span in spans
        for write in writes
    )


def _writes(step: RankStep) -> list[BackgroundRecord]:
    return [work for work in step.background if work.stage == "checkpoint" and work.name == "write"]


def _bandwidth(run: RunRecords) -> float | str:
    """Bytes per second that were written, all ranks of a step together by the longest of them."""
    num_bytes = seconds = 0.0
    for step in run.steps:
        steps = [of_rank[step] for of_rank in run.ranks.values()]
        num_bytes += sum(span.bytes for one in steps for span in one.named("checkpoint"))
        seconds += max(sum(work.end_s - work.start_s for work in _writes(one)) for one in steps)
    return num_bytes / seconds if num_bytes and seconds else UNKNOWN_VALUE


def long_tail(run: RunRecords, step_s: float) -> Finding | None:
    """Rounds of decoding beyond the mean response's: a round reads all weights whether one sample runs or all do."""
    longest, mean = run.mean_metric("response_length/max"), run.mean_metric("response_length/mean")
    rounds = decode_rounds(run)
    ratio = longest / mean if longest and mean else 1.0
    if rounds is None or longest is None or mean is None:
        return _imported_tail(run, ratio)
    cost = cost_of(run.per_step(decode_s)).scaled(min(1.0, max(0.0, longest - mean) / rounds))
    running, slots = run.mean_metric("rollout/mean_running") or 0.0, num_slots(run)
    values: dict[str, float | str] = {"running": running, "slots": slots, "ratio": ratio}
    if limit := run.setting("rollout.max_new_tokens"):
        values["overlong_cache"] = max(1, int(limit) // 4)
        if (shorter := int(4 * mean) + 1) < limit:
            values["shorter_limit"] = shorter
    samples = samples_per_rank(run)
    if samples and (most := run.setting("rollout.max_running")) and samples > most:
        values["more_slots"] = 2 * int(most)
    return finding("long_tail", cost, values)


def decode_rounds(run: RunRecords) -> float | None:
    """Rounds of decoding per step and rank; None where it is not known how many samples ran in the mean one."""
    running, tokens = run.mean_metric("rollout/mean_running"), run.mean_metric("tokens/response")
    if not running or not tokens:
        return None
    return max(1.0, tokens / len(run.ranks) / running)


def preemption(run: RunRecords, step_s: float) -> Finding | None:
    """A full cache: what was computed again, and the rounds more that it takes because fewer samples fit."""
    count, tokens = run.mean_metric("rollout/preemptions"), run.mean_metric("rollout/preempted_tokens")
    rounds, longest = decode_rounds(run), run.mean_metric("response_length/max")
    if not count or not tokens or rounds is None or not longest:
        return None
    slots = num_slots(run) or 1.0
    needed = max(longest, (run.mean_metric("tokens/response") or 0.0) / len(run.ranks) / slots)
    more = max(0.0, 1.0 - needed / rounds)
    again = min(1.0, tokens / (run.mean_metric("rollout/prefill_tokens") or tokens))

    def lost(step: RankStep) -> float:
        prefill = sum(span.self_s for span in step.named("rollout", "prefill"))
        return more * decode_s(step) + again * prefill

    measured = cost_of(run.per_step(lost))
    # a round of more samples takes longer than one of few, so that the rounds saved are worth less
    cost = Estimate(measured.value, _ROUND_LOW * measured.low, measured.high)
    values: dict[str, float | str] = {"count": count, "tokens": tokens}
    running = run.mean_metric("rollout/mean_running") or 1.0
    values["fewer_slots"] = max(1, int(running))
    if cache_gb := run.setting("rollout.kv_cache_gb"):
        values["cache_gb"] = cache_gb * slots / running
    return finding("preemption", cost, values)


def _imported_tail(run: RunRecords, ratio: float) -> Finding | None:
    """verl's agent loops log how long the mean and the longest sample took."""
    prefix = "timing_s/agent_loop/generate_sequences"
    longest, mean = run.mean_foreign(f"{prefix}/max"), run.mean_foreign(f"{prefix}/mean")
    if longest is None or mean is None:
        return None
    tail = Estimate(longest - mean, 0.5 * (longest - mean), longest - mean)
    return finding("long_tail", tail, {"running": UNKNOWN_VALUE, "slots": UNKNOWN_VALUE, "ratio": ratio})


def decode_s(step: RankStep) -> float:
    """Seconds of a step's rollout, without prefill and exchanges."""
    others = [span for span in step.named("rollout") if span.name == "prefill" or span.cause is not None]
    return max(0.0, step.stage_s("rollout") - sum(span.self_s for span in others))


def num_slots(run: RunRecords) -> float:
    """Samples that could run at once on a rank: those of a step, or as many as there are slots; 0 unknown."""
    samples, most = samples_per_rank(run), run.setting("rollout.max_running")
    return min(samples, float(most)) if most else samples


def samples_per_rank(run: RunRecords) -> float:
    """Samples of a step and rank; 0 unknown."""
    prompts, samples = run.setting("batch.num_prompts"), run.setting("batch.num_samples")
    return prompts * samples / len(run.ranks) if prompts and samples else 0.0


def slow_rank(run: RunRecords, step_s: float) -> Finding | None:
    """Ranks waiting for one another: for a rank that is always late with the same work, or for one that had more."""
    late = find_straggler(run)
    if late is None:
        return None
    uneven = max(late.tokens_over_mean, run.mean_metric("balance/tokens_max_over_mean") or 1.0)
    if uneven >= _UNEVEN:
        return finding("token_imbalance", late.wait, {"rank": late.rank, "ratio": uneven})
    if late.persistence >= PERSISTENT:
        return finding("slow_rank", late.wait, {"rank": late.rank, "where": late.stage})
    return finding("uneven_ranks", late.wait, {"where": late.stage})


def slow_link(run: RunRecords, step_s: float) -> Finding | None:
    """Exchanges between ranks."""
    if len(run.ranks) < 2 and not run.profiled:
        return None
    cost, stage = link_cost(run), exchange_stage(run)
    return finding("slow_link", cost, {"share": _share(cost, step_s), "where": stage}, stage)


def frequent_eval(run: RunRecords, step_s: float) -> Finding | None:
    """Evaluations every so many steps."""
    every = run.setting("run.eval_every")
    if not every:
        return None
    cost = stage_cost(run, "eval")
    return finding("frequent_eval", cost, {"share": _share(cost, step_s), "every_twofold": 2 * int(every)})


def weight_sync(run: RunRecords, step_s: float) -> Finding | None:
    """Handing weights to the rollout engine, exchanges between ranks aside."""

    def own(step: RankStep) -> float:
        exchanged = sum(span.self_s for span in step.named("sync") if span.cause == "communication")
        return max(0.0, step.stage_s("sync") - exchanged)

    cost = cost_of(run.per_step(own))
    return finding("weight_sync", cost, {"share": _share(cost, step_s)})


def unaccounted(run: RunRecords, step_s: float) -> Finding | None:
    """Time in no span; of an imported run it is what its log does not say, and no finding."""
    if run.is_imported:
        return None
    cost = cost_of(run.per_step(lambda step: step.section.unaccounted_s))
    return finding("unaccounted", cost, {"share": _share(cost, step_s)})


def find_drift(run: RunRecords, step_s: float) -> Drift | None:
    """The trend of step time; None below four steps."""
    walls = run.per_step(lambda step: step.wall_s)
    slope = trend(run.steps, walls)
    if slope is None:
        return None
    length = run.steps[-1] - run.steps[0]
    change = slope.value * length
    is_drift = len(walls) >= _MIN_DRIFT_STEPS and slope.low > 0 and change > _DRIFT_SHARE * step_s
    return Drift(slope.value, slope.low, slope.high, change, is_drift)


def drift(run: RunRecords, step_s: float) -> Finding | None:
    """Steps that take ever longer: what the mean step takes more than the first."""
    found = find_drift(run, step_s)
    if found is None or not found.is_drift:
        return None
    half = (run.steps[-1] - run.steps[0]) / 2
    cost = Estimate(found.slope_s * half, found.low * half, found.high * half)
    return finding("drift", cost, {"change": found.change_s, "slope": 100 * found.slope_s})


def host_between_passes(run: RunRecords, stages: Sequence[str]) -> Estimate:
    """What the host does between the passes of stages; of a stage whose passes were not recorded nothing is known."""

    def between(step: RankStep) -> float:
        return sum(own_s(step, stage) for stage in stages if passes_of(step, stage))

    return cost_of(run.per_step(between))


def _share(cost: Estimate, step_s: float) -> float:
    return cost.value / step_s if step_s else 0.0
