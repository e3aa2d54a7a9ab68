"""What of a run's metrics a person should look at now. Every rule has its threshold beside its reason."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.monitor.following import RunFollower
from paceline.monitor.words import ALARMS, say
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
_STATUS_TEXTS = {"failed": ("the run failed", "运行失败"), "refused": ("the run was refused", "运行被拒绝")}


@dataclass(frozen=True, slots=True)
class Alarm:
    """`name` is the rule's, `metric` what it looked at, `value` what it saw there; `text` says it to a person, and
    `text_zh` in Chinese."""

    name: str
    metric: str
    value: float
    text: str
    text_zh: str


Rule = Callable[[Sequence[MetricRecord]], Alarm | None]


def _alarm(name: str, metric: str, value: float, **said: object) -> Alarm:
    """An alarm in both languages; `said` is what the rule's texts put in beside metric and value."""
    values = {"metric": metric, "value": value, **said}
    return Alarm(name, metric, value, say(ALARMS, name, "en", **values), say(ALARMS, name, "zh", **values))


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
            return _alarm("not_finite", name, value, step=records[-1].step)
    return None


def _counted(name: str, metrics: Sequence[str]) -> Rule:
    """An alarm as soon as one of these sums is not 0 in the window."""

    def rule(records: Sequence[MetricRecord]) -> Alarm | None:
        for metric in metrics:
            if total := _sum(records, metric):
                return _alarm(name, metric, total, count=f"{total:g}", steps=_shown(records))
        return None

    return rule


def _reward_failures(records: Sequence[MetricRecord]) -> Alarm | None:
    total = _sum(records, "reward/timeouts") + _sum(records, "reward/errors")
    if not total:
        return None
    return _alarm(
        "reward_failures", "samples/without_verdict", total, count=f"{total:g}", steps=_shown(records)
    )


def _no_signal(records: Sequence[MetricRecord]) -> Alarm | None:
    spread = [
        value for record in records[-WINDOW:] if (value := record.metrics.get("reward/std")) is not None
    ]
    if len(spread) < WINDOW or any(spread):
        return None
    return _alarm("no_signal", "reward/std", 0.0, steps=len(spread))


def _truncated(records: Sequence[MetricRecord]) -> Alarm | None:
    share = _mean(records, "truncated_fraction")
    if share is None or share <= _TRUNCATED:
        return None
    return _alarm("truncated", "truncated_fraction", share, share=f"{share:.0%}")


def _mfu(records: Sequence[MetricRecord]) -> Alarm | None:
    for name, value in records[-1].metrics.items():
        if name.startswith("mfu/") and (reason := mfu_alarm(value)) is not None:
            return _alarm("mfu", name, value, reason=reason)
    return None


def _slower(records: Sequence[MetricRecord]) -> Alarm | None:
    times = [value for record in records if (value := record.metrics.get("time/step")) is not None]
    if len(times) < 2 * WINDOW:
        return None
    before, now = statistics.median(times[1:-WINDOW]), statistics.median(times[-WINDOW:])
    if now <= _SLOWER * before:
        return None
    ratio = f"{now / before:.1f}"
    return _alarm("slower", "time/step", now, now=f"{now:.3g}", before=f"{before:.3g}", ratio=ratio)


def _unequal_ranks(records: Sequence[MetricRecord]) -> Alarm | None:
    ratio = _mean(records, "balance/busy_max_over_mean")
    rank = records[-1].metrics.get("balance/slowest_rank")
    if ratio is None or rank is None or ratio <= _UNEQUAL:
        return None
    return _alarm(
        "unequal_ranks", "balance/busy_max_over_mean", ratio, ratio=f"{ratio:.2f}", rank=f"{rank:.0f}"
    )


def _logprobs_apart(records: Sequence[MetricRecord]) -> Alarm | None:
    apart = _mean(records, "rollout/logprob_difference_mean")
    if apart is None or apart <= _LOGPROB_NATS:
        return None
    return _alarm("logprobs_apart", "rollout/logprob_difference_mean", apart, nats=f"{apart:.2g}")


def _entropy_collapse(records: Sequence[MetricRecord]) -> Alarm | None:
    seen = [value for record in records if (value := record.metrics.get("entropy")) is not None]
    if len(seen) < WINDOW or not 0.0 <= seen[-1] < _ENTROPY_LEFT * seen[0]:
        return None
    return _alarm("entropy_collapse", "entropy", seen[-1], first=f"{seen[0]:.2g}", last=f"{seen[-1]:.2g}")


def _host_memory(records: Sequence[MetricRecord]) -> Alarm | None:
    seen = [value for record in records if (value := record.metrics.get("memory/host_rss")) is not None]
    if len(seen) < 2 * WINDOW or seen[-1] - seen[WINDOW - 1] < _HOST_GROWTH:
        return None
    grown = seen[-1] - seen[WINDOW - 1]
    return _alarm("host_memory", "memory/host_rss", seen[-1], grown=f"{grown / 2**30:.1f}")


def _unaccounted(records: Sequence[MetricRecord]) -> Alarm | None:
    step, lost = _mean(records, "time/step"), _mean(records, "time/unaccounted")
    if not step or lost is None or lost <= _UNACCOUNTED * step:
        return None
    return _alarm("unaccounted", "time/unaccounted", lost, share=f"{lost / step:.0%}")


def _silent(run: RunFollower, records: Sequence[MetricRecord]) -> Alarm | None:
    if run.status != "running":
        return None
    usual = _mean(records, "time/step") or 0.0
    silent_s = run.silent_for_s()
    if silent_s <= max(MIN_SILENCE_S, _SILENT_STEPS * usual):
        return None
    return _alarm("silent", "time/step", silent_s, seconds=f"{silent_s:.0f}")


def _failed(run: RunFollower) -> Alarm | None:
    status = run.status
    if status == "died":
        return _alarm("died", "status", 1.0)
    if status not in ("failed", "refused"):
        return None
    english, chinese = _STATUS_TEXTS[status]
    return Alarm(status, "status", 1.0, run.message or english, _joined(chinese, run.message))


def _joined(chinese: str, message: str) -> str:
    """A run's message stays in its own words, introduced."""
    return f"{chinese}：{message}" if message else chinese


def _shown(records: Sequence[MetricRecord]) -> int:
    return len(records[-WINDOW:])


def _sum(records: Sequence[MetricRecord], name: str) -> float:
    return sum(record.metrics.get(name, 0.0) for record in records[-WINDOW:])


def _mean(records: Sequence[MetricRecord], name: str) -> float | None:
    seen = [value for record in records[-WINDOW:] if (value := record.metrics.get(name)) is not None]
    return sum(seen) / len(seen) if seen else None


RULES: tuple[Rule, ...] = (
    _not_finite,
    _counted("updates_skipped", ("updates/skipped", "critic/updates/skipped")),
    _counted("out_of_memory", ("memory/out_of_memory_retries", "critic/memory/out_of_memory_retries")),
    _reward_failures,
    _no_signal,
    _counted("exhausted", ("rollout/exhausted",)),
    _counted("overlong", ("samples/overlong", "critic/samples/overlong")),
    _counted("checkpoint_waits", ("checkpoint/waits",)),
    _truncated,
    _mfu,
    _slower,
    _unequal_ranks,
    _logprobs_apart,
    _entropy_collapse,
    _host_memory,
)
"""The rules that look at metrics alone; each gets at least one record."""
