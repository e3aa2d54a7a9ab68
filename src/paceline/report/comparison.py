"""Two runs side by side: what each stage and wait became, and what was changed between them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.report.charts_time import stage_seconds
from paceline.report.intervals import Z_95
from paceline.report.palette import UNACCOUNTED, ordered
from paceline.report.run_data import RunData

STEP = "step"
"""Beside the stages: the whole step."""


@dataclass(frozen=True, slots=True)
class Change:
    """Mean seconds per step of a stage in both runs, and the difference (second minus first) with its 95 % interval;
    None where a run has fewer than two steps."""

    stage: str
    first_s: float
    second_s: float
    low: float | None
    high: float | None

    @property
    def difference_s(self) -> float:
        """Second minus first."""
        return self.second_s - self.first_s

    @property
    def is_beyond_chance(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A setting that differs; None where a run lacks it."""

    name: str
    first: Any
    second: Any


def stage_changes(first: RunData, second: RunData) -> list[Change]:
    """The whole step, then every stage of either run in the order they run."""
    one, two = first.timed_steps, second.timed_steps
    names = ordered({name for step in (*one, *two) for name in step.stages} | {UNACCOUNTED})
    changes = [_change(STEP, [step.wall_s for step in one], [step.wall_s for step in two])]
    for name in names:
        changes.append(
            _change(
                name, [stage_seconds(step, name) for step in one], [stage_seconds(step, name) for step in two]
            )
        )
    return [change for change in changes if change.first_s or change.second_s]


def _change(stage: str, one: Sequence[float], two: Sequence[float]) -> Change:
    mean_one, mean_two = _mean(one), _mean(two)
    half = _half_width(one, two)
    difference = mean_two - mean_one
    low, high = (None, None) if half is None else (difference - half, difference + half)
    return Change(stage, mean_one, mean_two, low, high)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _half_width(one: Sequence[float], two: Sequence[float]) -> float | None:
    """Half the 95 % interval of a difference of means with unequal variances (Welch); steps count as independent."""
    if len(one) < 2 or len(two) < 2:
        return None
    variance = sum(_variance(values) / len(values) for values in (one, two))
    return Z_95 * math.sqrt(variance)


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def setting_changes(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[SettingChange]:
    """Settings that differ, by dotted name, in the order of the files. Names of runs and their folders are left out."""
    one, two = flat(first), flat(second)
    return [
        SettingChange(name, one.get(name), two.get(name))
        for name in dict.fromkeys((*one, *two))
        if one.get(name) != two.get(name) and name not in _OWN
    ]


_OWN = ("run.name", "run.dir", "unix_s", "v")


def flat(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, by dotted names."""
    found: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
