"""What of a run's metrics a person should look at now. Every rule has its threshold beside its reason."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.monitor.following import RunFollower
from paceline.telemetry.flops import mfu_alarm
from paceline.telemetry.metrics import MetricRecord

WINDOW = 8
"""Steps that a rule looks back: an alarm goes when what raised it is that long ago."""

MIN_SILENCE_S = 60.0
_SILENT_STEPS = 10.0
_SLOWER = 1.5
_UNACCOUNTED = 0.05
_TRUNCATED = 0.5
_UNEQUAL = 1.2
_LOGPROB_NATS = 0.1
_ENTROPY_LEFT = 0.1
_HOST_GROWTH = 2 * 2**30
_STATUS_TEXTS = {"failed": "failed", "refused": "was refused"}


@dataclass(frozen=True, slots=True)
class Alarm:
    """`name` is the rule's, `metric` what it looked at, `value` what it saw there; `text` says it to a person."""

    name: str
    metric: str
    value: float
    text: str


Rule = Callable[[Sequence[MetricRecord]], Alarm | None]


def alarms_of(run: RunFollower) -> list[Alarm]:
    """All alarms of a run as it stands, in the order of the rules."""
    records = [record for record in run.records if record.step > 0]
    found = [rule(records) for rule in RULES] if records else []
    if run.status != "imported":
        found.append(_unaccounted(records))  # what another framework's log leaves out is no fault of the run
    found += [_silent(run, records), _failed(run)]
    return [alarm for alarm in found if alarm is not None]


def _not_finite(records: Sequence[MetricRecord]) -> Alarm | None:
    for name in ("loss/total", "critic/loss", "grad_norm", "critic/grad_norm", "reward/mean", "entropy"):
        value = records[-1].metrics.get(name)
        if value is not None and not math.isfinite(value):
            return Alarm("not_finite", name, value, f"{name} is {value} in step {records[-1].step}")
    return None


def _counted(name: str, metrics: Sequence[str], text: str) -> Rule:
    """An alarm as soon as one of these sums is not 0 in the window."""

    def rule(records: Sequence[MetricRecord]) -> Alarm | None:
        for metric in metrics:
            if total := _sum(records, metric):
                return Alarm(name, metric, total, f"{total:g} {text} in the last {_shown(records)} steps")
        return None

    return rule


def _reward_failures(records: Sequence[MetricRecord]) -> Alarm | None:
    total = _sum(records, "reward/timeouts") + _sum(records, "reward/errors")
    if not total:
        return None
    text = f"{total:g} samples without a verdict in the last {_shown(records)} steps: the reward timed out or failed"
    return Alarm("reward_failures", "samples/without_verdict", total, text)


def _no_signal(records: Sequence[MetricRecord]) -> Alarm | None:
    spread = [
        value for record in records[-WINDOW:] if (value := record.metrics.get("reward/std")) is not None
    ]
    if len(spread) < WINDOW or any(spread):
        return None
    text = f"all rewards of a step are equal, {len(spread)} steps long: nothing to learn from"
    return Alarm("no_signal", "reward/std", 0.0, text)


def _truncated(records: Sequence[MetricRecord]) -> Alarm | None:
    share = _mean(records, "truncated_fraction")
    if share is None or share <= _TRUNCATED:
        return None
    text = f"{share:.0%} of the samples reach rollout.max_new_tokens"
    return Alarm("truncated", "truncated_fraction", share, text)


def _mfu(records: Sequence[MetricRecord]) -> Alarm | None:
    for name, value in records[-1].metrics.items():
        if name.startswith("mfu/") and (text := mfu_alarm(value)) is not None:
            return Alarm("mfu", name, value, f"{name}: {text}")
    return None


def _slower(records: Sequence[MetricRecord]) -> Alarm | None:
    times = [value for record in records if (value := record.metrics.get("time/step")) is not None]
    if len(times) < 2 * WINDOW:
        return None
    before, now = statistics.median(times[1:-WINDOW]), statistics.median(times[-WINDOW:])
    if now <= _SLOWER * before:
        return None
    text = f"steps take {now:.3g} s, {now / before:.1f} x the {before:.3g} s of earlier ones"
    return Alarm("slower", "time/step", now, text)


def _unequal_ranks(records: Sequence[MetricRecord]) -> Alarm | None:
    ratio = _mean(records, "balance/busy_max_over_mean")
    rank = records[-1].metrics.get("balance/slowest_rank")
    if ratio is None or rank is None or ratio <= _UNEQUAL:
        return None
    text = f"the busiest rank works {ratio:.2f} x the mean; in the last step it is rank {rank:.0f}"
    return Alarm("unequal_ranks", "balance/busy_max_over_mean", ratio, text)


def _logprobs_apart(records: Sequence[MetricRecord]) -> Alarm | None:
    apart = _mean(records, "rollout/logprob_difference_mean")
    if apart is None or apart <= _LOGPROB_NATS:
        return None
    text = f"sampled and scored log-probs are {apart:.2g} nats apart: rollout and training disagree on the policy"
    return Alarm("logprobs_apart", "rollout/logprob_difference_mean", apart, text)


def _entropy_collapse(records: Sequence[MetricRecord]) -> Alarm | None:
    seen = [value for record in records if (value := record.metrics.get("entropy")) is not None]
    if len(seen) < WINDOW or not 0.0 <= seen[-1] < _ENTROPY_LEFT * seen[0]:
        return None
    text = f"entropy fell from {seen[0]:.2g} to {seen[-1]:.2g} nats: samples become alike"
    return Alarm("entropy_collapse", "entropy", seen[-1], text)


def _host_memory(records: Sequence[MetricRecord]) -> Alarm | None:
    seen = [value for record in records if (value := record.metrics.get("memory/host_rss")) is not None]
    if len(seen) < 2 * WINDOW or seen[-1] - seen[WINDOW - 1] < _HOST_GROWTH:
        return None
    grown = seen[-1] - seen[WINDOW - 1]
    text = f"host memory grew by {grown / 2**30:.1f} GiB since the run was warm"
    return Alarm("host_memory", "memory/host_rss", seen[-1], text)


def _unaccounted(records: Sequence[MetricRecord]) -> Alarm | None:
    step, lost = _mean(records, "time/step"), _mean(records, "time/unaccounted")
    if not step or lost is None or lost <= _UNACCOUNTED * step:
        return None
    text = f"{lost / step:.0%} of the step lies in no stage"
    return Alarm("unaccounted", "time/unaccounted", lost, text)


def _silent(run: RunFollower, records: Sequence[MetricRecord]) -> Alarm | None:
    if run.status != "running":
        return None
    usual = _mean(records, "time/step") or 0.0
    silent_s = run.silent_for_s()
    if silent_s <= max(MIN_SILENCE_S, _SILENT_STEPS * usual):
        return None
    text = f"nothing was recorded for {silent_s:.0f} s: the run hangs, evaluates for long, or its process is gone"
    return Alarm("silent", "time/step", silent_s, text)


def _failed(run: RunFollower) -> Alarm | None:
    status = run.status
    if status == "died":
        return Alarm("died", "status", 1.0, "the run's process is gone and has not said why: it was killed")
    if status not in ("failed", "refused"):
        return None
    return Alarm(status, "status", 1.0, run.message or f"the run {_STATUS_TEXTS[status]}")


def _shown(records: Sequence[MetricRecord]) -> int:
    return len(records[-WINDOW:])


def _sum(records: Sequence[MetricRecord], name: str) -> float:
    return sum(record.metrics.get(name, 0.0) for record in records[-WINDOW:])


def _mean(records: Sequence[MetricRecord], name: str) -> float | None:
    seen = [value for record in records[-WINDOW:] if (value := record.metrics.get(name)) is not None]
    return sum(seen) / len(seen) if seen else None


RULES: tuple[Rule, ...] = (
    _not_finite,
    _counted(
        "updates_skipped",
        ("updates/skipped", "critic/updates/skipped"),
        "updates skipped for a gradient that is not finite",
    ),
    _counted(
        "out_of_memory",
        ("memory/out_of_memory_retries", "critic/memory/out_of_memory_retries"),
        "mini-batches begun again because memory ran out",
    ),
    _reward_failures,
    _no_signal,
    _counted("exhausted", ("rollout/exhausted",), "times dynamic sampling gave up short of groups"),
    _counted(
        "overlong", ("samples/overlong", "critic/samples/overlong"), "samples longer than the token budget"
    ),
    _counted("checkpoint_waits", ("checkpoint/waits",), "saves waited for the one before to be written"),
    _truncated,
    _mfu,
    _slower,
    _unequal_ranks,
    _logprobs_apart,
    _entropy_collapse,
    _host_memory,
)
"""The rules that look at metrics alone; each gets at least one record."""
