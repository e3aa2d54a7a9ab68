"""Two runs beside one another: times paired by step, and which settings differ."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.diagnosis.catalog import FINDINGS
from paceline.diagnosis.estimates import Estimate, mean_of
from paceline.diagnosis.features import FEATURES, Feature
from paceline.diagnosis.run_records import RankStep, RunRecords
from paceline.explanation.figures import CHECKPOINT, WAITS, stated_s, states_causes

_LEAST_PAIRS = 3
_NAMES = ("run.name", "run.dir", "run.resume")
_DISPLAYS = ("telemetry.live", "telemetry.sinks", "telemetry.metrics_port", "telemetry.metrics_host")
_NO_CAUSE_OF_TIME = {*_NAMES, *_DISPLAYS}


@dataclass(frozen=True, slots=True)
class Change:
    """Seconds per step that the run has more (negative: less) than the one it is compared with, mean over paired steps
    with a 95 % interval. `is_clear`: the interval leaves zero out."""

    name: str
    seconds: Estimate

    @property
    def is_clear(self) -> bool:
        return self.seconds.low > 0.0 or self.seconds.high < 0.0


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting with its value in the run and in the other; None where one lacks it."""

    key: str
    value: Any
    other: Any


@dataclass(frozen=True, slots=True)
class Comparison:
    """`step_s` and `other_step_s` are means over the `num_pairs` steps that both runs have. `waits` are `checkpoint`
    and `idle` by stage, and by cause those of all other stages, so that none is told twice. `features` are those that
    the run has on and the other not."""

    num_pairs: int
    step_s: float
    other_step_s: float
    step: Change
    stages: tuple[Change, ...]
    waits: tuple[Change, ...]
    differences: tuple[Difference, ...]
    features: tuple[Feature, ...]

    @property
    def only_feature(self) -> Feature | None:
        """The feature that is the one thing the runs differ in; None where there are several, or none."""
        if len(self.features) != 1:
            return None
        feature = self.features[0]
        return feature if all(one.key in feature.keys for one in self.differences) else None

    @property
    def unexplained_stages(self) -> tuple[str, ...]:
        """Stages that changed clearly though the only feature is not known to act on them."""
        feature = self.only_feature
        if feature is None:
            return ()
        touched = {FINDINGS[name].stage for name in feature.helps} | {stage for stage, _ in feature.cells}
        return tuple(
            change.name for change in self.stages if change.is_clear and change.name not in {*touched, "idle"}
        )


def compare(run: RunRecords, other: RunRecords) -> Comparison | None:
    """The comparison; None where too few steps of the same number count in both runs."""
    pairs = tuple(sorted(set(run.steps) & set(other.steps)))
    if len(pairs) < _LEAST_PAIRS:
        return None
    differences = _differences(run.config, other.config)
    names = {
        name
        for one in (run, other)
        for steps in one.ranks.values()
        for step in pairs
        for name in steps[step].section.stages
    }
    stages = [
        _change(run, other, pairs, name, partial(RankStep.stage_s, stage=name)) for name in sorted(names)
    ]
    return Comparison(
        num_pairs=len(pairs),
        step_s=_mean(run, pairs),
        other_step_s=_mean(other, pairs),
        step=_change(run, other, pairs, "step", lambda step: step.wall_s),
        stages=tuple(sorted(stages, key=lambda change: -abs(change.seconds.value))),
        waits=_waits(run, other, pairs),
        differences=differences,
        features=_features(differences),
    )


def _waits(run: RunRecords, other: RunRecords, pairs: tuple[int, ...]) -> tuple[Change, ...]:
    """Waits that both runs measure: what stands still in a stage of its own, and, of the other stages, causes where
    spans state them."""
    found = [
        _change(run, other, pairs, name, partial(RankStep.stage_s, stage=name))
        for name in (CHECKPOINT, "idle")
    ]
    if states_causes(run) and states_causes(other):
        found += [
            _change(run, other, pairs, cause, partial(stated_s, cause=cause, apart=(CHECKPOINT, "idle")))
            for cause in WAITS
        ]
    return tuple(sorted(found, key=lambda change: change.seconds.value))


def _change(
    run: RunRecords,
    other: RunRecords,
    pairs: tuple[int, ...],
    name: str,
    figure: Callable[[RankStep], float],
) -> Change:
    differences = [_over_ranks(run, step, figure) - _over_ranks(other, step, figure) for step in pairs]
    return Change(name, mean_of(differences))


def _over_ranks(run: RunRecords, step: int, figure: Callable[[RankStep], float]) -> float:
    return sum(figure(steps[step]) for steps in run.ranks.values()) / len(run.ranks)


def _mean(run: RunRecords, pairs: tuple[int, ...]) -> float:
    return sum(_over_ranks(run, step, lambda one: one.wall_s) for step in pairs) / len(pairs)


def _differences(config: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Settings whose values differ, names of runs and of displays left out."""
    own, others = _flat(config), _flat(other)
    keys = sorted((own.keys() | others.keys()) - _NO_CAUSE_OF_TIME)
    return tuple(
        Difference(key, own.get(key), others.get(key)) for key in keys if own.get(key) != others.get(key)
    )


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, content in config.items()
        if isinstance(content, Mapping)
        for key, value in content.items()
    }


def _features(differences: tuple[Difference, ...]) -> tuple[Feature, ...]:
    """Features that the differences switch on. Where two are told apart only by a value that depends on the run, such
    as more and fewer slots, neither is named."""
    found = [feature for feature in FEATURES.values() if _is_switched_on(feature, differences)]
    return tuple(
        feature
        for feature in found
        if not all(map(_is_filled_in, feature.keys.values()))
        or sum(other.keys.keys() == feature.keys.keys() for other in found) == 1
    )


def _is_switched_on(feature: Feature, differences: tuple[Difference, ...]) -> bool:
    """Whether the run has all of a feature's settings and the other lacks one that differs. A setting whose value the
    feature takes from the run (`{...}`) counts when it differs at all."""
    by_key = {one.key: one for one in differences}
    named = {key: value for key, value in feature.keys.items() if not _is_filled_in(value)}
    if not any(key in by_key for key in feature.keys):
        return False
    return all(key not in by_key or by_key[key].value == value for key, value in named.items())


def _is_filled_in(value: object) -> bool:
    return isinstance(value, str) and value.startswith("{")
