"""A run at one moment: what the panel shows and `watch --json` prints."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.monitor.alarms import Alarm, alarms_of
from paceline.monitor.following import RankProgress, RunFollower, StepTimes
from paceline.telemetry.jsonl import encode_number

STEPS_IN_MEANS = 8
"""Steps that times are means of: recent, but not one step's luck."""

_CURVE = 48


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Times in seconds, means over ranks and the last `STEPS_IN_MEANS` steps; None is what is not known.

    `metrics` are those of the last recorded step. `stages` adds up to `step_s` together with `unaccounted_s`.
    """

    name: str
    status: str
    message: str
    step: int
    num_steps: int | None
    num_ranks: int
    silent_s: float
    step_s: float | None
    left_s: float | None
    stages: Mapping[str, float]
    unaccounted_s: float | None
    busiest_stage: str | None
    metrics: Mapping[str, float]
    reward: tuple[float, ...]
    step_times: tuple[float, ...]
    eval_accuracy: tuple[float, ...]
    alarms: tuple[Alarm, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON's types: numbers that are not finite as texts, as in the records."""
        record = asdict(self)
        record["metrics"] = {name: encode_number(value) for name, value in self.metrics.items()}
        for curve in ("reward", "step_times", "eval_accuracy"):
            record[curve] = [encode_number(value) for value in record[curve]]
        for alarm in record["alarms"]:
            alarm["value"] = encode_number(alarm["value"])
        return record


def take_snapshot(run: RunFollower) -> Snapshot:
    """The run as the follower has last seen it."""
    step_s, stages, unaccounted_s = _recent_times(list(run.ranks.values()))
    last = run.records[-1] if run.records else None
    step = max(
        [last.step if last else 0, *(steps[-1].step for steps in map(_recent, run.ranks.values()) if steps)]
    )
    planned = run.num_steps_planned
    is_open = run.status == "running" and step_s is not None and planned is not None
    return Snapshot(
        name=run.name,
        status=run.status,
        message=str(run.summary.get("message", "")),
        step=step,
        num_steps=planned,
        num_ranks=len(run.ranks),
        silent_s=run.silent_for_s(),
        step_s=step_s,
        left_s=step_s * max(0, planned - step)
        if is_open and step_s is not None and planned is not None
        else None,
        stages=stages,
        unaccounted_s=unaccounted_s,
        busiest_stage=max(stages, key=lambda name: stages[name]) if stages else None,
        metrics=dict(last.metrics) if last else {},
        reward=_curve(run, "reward/mean"),
        step_times=_curve(run, "time/step"),
        eval_accuracy=_curve(run, "eval/accuracy"),
        alarms=tuple(alarms_of(run)),
    )


def _recent(rank: RankProgress) -> list[StepTimes]:
    return list(rank.recent)[-STEPS_IN_MEANS:]


def _recent_times(ranks: list[RankProgress]) -> tuple[float | None, dict[str, float], float | None]:
    """Mean step, mean seconds by stage (longest first), mean unaccounted seconds, over ranks and recent steps."""
    steps = [step for rank in ranks for step in _recent(rank)]
    if not steps:
        return None, {}, None
    names = dict.fromkeys(name for step in steps for name in step.stage_s)
    means = {name: sum(step.stage_s.get(name, 0.0) for step in steps) / len(steps) for name in names}
    wall_s = sum(step.wall_s for step in steps) / len(steps)
    unaccounted_s = sum(step.unaccounted_s for step in steps) / len(steps)
    return wall_s, dict(sorted(means.items(), key=lambda item: -item[1])), unaccounted_s


def _curve(run: RunFollower, name: str) -> tuple[float, ...]:
    values = [value for record in run.records if (value := record.metrics.get(name)) is not None]
    return tuple(values[-_CURVE:])
