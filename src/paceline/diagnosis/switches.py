"""From costs to switches: what each feature would save, and the settings that switch it on."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paceline.diagnosis.features import FEATURES, Feature, Shares
from paceline.diagnosis.results import Finding, StageDiagnosis, Switch
from paceline.diagnosis.run_records import RunRecords
from paceline.types import CAUSES, Cause

BOTTLENECK = "bottleneck"
"""What a switch's `finding` says where it reduces the bottleneck itself and not a finding."""

_MIN_SAVED_SHARE = 0.005
"""Switches that would save less of a step are not named."""


def switches_for(
    run: RunRecords, findings: Sequence[Finding], stages: Sequence[StageDiagnosis], step_s: float
) -> tuple[Switch, ...]:
    """Switches against findings, and against the bottleneck, ranked by what they would save; those that change what is
    learned come after all that do not."""
    found = [
        switch
        for feature in FEATURES.values()
        if (switch := best_switch(run, feature, findings, stages[:1])) is not None
    ]
    worth = [switch for switch in found if switch.saved_s >= _MIN_SAVED_SHARE * step_s]
    return tuple(sorted(worth, key=lambda switch: (switch.changes_training, -switch.saved_s)))


def best_switch(
    run: RunRecords, feature: Feature, findings: Iterable[Finding], stages: Iterable[StageDiagnosis]
) -> Switch | None:
    """What a feature saves most on among findings and stages; None where it is on already or does not apply."""
    if not _applies(run, feature):
        return None
    options = [
        switch
        for one in findings
        if one.id in feature.helps and (switch := _against(run, feature, one)) is not None
    ]
    options += [switch for stage in stages for switch in _against_cells(run, feature, stage)]
    return max(options, key=lambda switch: switch.saved_s, default=None)


def _applies(run: RunRecords, feature: Feature) -> bool:
    for name, allowed in feature.requires.items():
        value = run.setting(name)
        if name == "cluster.device" and value == "auto":
            value = run.environment.get("device", value)
        if value is not None and value not in allowed:
            return False
    return True


def _against(run: RunRecords, feature: Feature, one: Finding) -> Switch | None:
    keys = _settings(run, feature, one.values)
    if keys is None:
        return None
    low, expected, high = feature.helps[one.id]
    return _switch(feature, one.id, one.cause, keys, (low * one.low, expected * one.seconds, high * one.high))


def _against_cells(run: RunRecords, feature: Feature, stage: StageDiagnosis) -> Iterable[Switch]:
    """Against what bounds a stage, where its cells are not known by its bound alone. Not of an imported run: whether
    the feature is on there is not known, and no finding says that its like is missing."""
    if run.is_imported:
        return
    for cause in CAUSES:
        shares: Shares | None = feature.cells.get((stage.stage, cause))
        seconds = stage.cells[cause] if stage.cells is not None else stage.seconds * (stage.kind == cause)
        keys = _settings(run, feature, _machine(run))
        if shares is not None and seconds > 0.0 and keys is not None:
            low, expected, high = (share * seconds for share in shares)
            yield _switch(feature, BOTTLENECK, cause, keys, (low, expected, high))


def _machine(run: RunRecords) -> dict[str, float | str]:
    """Values that settings against a bottleneck may name."""
    found: dict[str, float | str] = {}
    cores, threads = (
        run.environment.get("cpu", {}).get("num_usable_cores"),
        run.environment.get("num_threads"),
    )
    if cores and threads and cores > threads:
        found["cores"] = cores
    prompts, samples = run.setting("batch.num_prompts"), run.setting("batch.num_samples")
    most = run.setting("rollout.max_running")
    if prompts and samples and most and prompts * samples > most * len(run.ranks):
        found["more_slots"] = 2 * most
    return found


def _switch(
    feature: Feature, finding: str, cause: Cause, keys: Mapping[str, Any], saved: tuple[float, float, float]
) -> Switch:
    low, expected, high = saved
    return Switch(
        feature=feature.id,
        finding=finding,
        cause=cause,
        saved_s=expected,
        low=low,
        high=high,
        risk=feature.risk["en"],
        prerequisite=feature.prerequisite["en"],
        keys=keys,
        changes_training=feature.changes_training,
    )


def _settings(run: RunRecords, feature: Feature, values: Mapping[str, float | str]) -> dict[str, Any] | None:
    """The feature's settings with the finding's values put in; None where a value is missing or all are in force."""
    try:
        keys = {key: _filled(value, values) for key, value in feature.keys.items()}
    except KeyError:  # the finding does not know it: the switch does not apply
        return None
    in_force = all(run.setting(key) == value for key, value in keys.items())
    return None if in_force else keys


def _filled(value: Any, values: Mapping[str, float | str]) -> Any:
    if isinstance(value, Mapping):
        return {_filled(key, values): _filled(inner, values) for key, inner in value.items()}
    if isinstance(value, str) and value.startswith("{") and value.endswith("}"):
        return values[value[1:-1]]
    return value
