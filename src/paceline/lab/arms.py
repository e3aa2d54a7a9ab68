"""What an ablation compares: features by name or by their settings, and combinations of them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from paceline.config import ConfigError
from paceline.config.loading import parse_override
from paceline.diagnosis.features import FEATURES, Feature
from paceline.lab.results import BASELINE

RECORDING = "recording"
"""Name of the run that records the rollouts which all others replay."""
ALL = "all"
"""Stands for every feature in `--combine`, unless a feature has this name."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far an arm may be from the baseline: `loss` in nats, `grad_norm` relative to the baseline's, and the same for
    models in 16 bits. None: no bound is stated, because the feature changes the optimisation or nobody has said."""

    loss: float | None = None
    grad_norm: float | None = None
    loss_16bit: float | None = None
    grad_norm_16bit: float | None = None

    def at(self, dtype: str) -> "Tolerance":
        """The bounds that hold for a model of this precision, as `loss` and `grad_norm`."""
        if dtype not in ("bfloat16", "float16"):
            return Tolerance(self.loss, self.grad_norm)
        return Tolerance(self.loss_16bit, self.grad_norm_16bit)


@dataclass(frozen=True, slots=True)
class Arm:
    """One configuration under test: the baseline's settings with `keys` changed. `features` are ids of the feature map
    or names of one's own."""

    name: str
    features: tuple[str, ...]
    keys: Mapping[str, Any]
    tolerance: Tolerance

    @property
    def overrides(self) -> dict[str, Any]:
        """The changed settings as nested sections."""
        sections: dict[str, Any] = {}
        for key, value in self.keys.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        return sections


def as_overrides(keys: Mapping[str, Any]) -> list[str]:
    """Settings as texts that a command line takes."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in keys.items()]


def baseline_arm() -> Arm:
    """The recipe as it is."""
    return Arm(BASELINE, (), {}, Tolerance())


def parse_features(texts: Iterable[str]) -> list[Arm]:
    """Arms of `--features`: ids of the feature map, `NAME:key=value,key=value`, or an id with values of its own.

    Raises:
        ConfigError: a name that the map lacks and that has no settings, a name used twice, or a setting that does not
            exist.
    """
    arms: list[Arm] = []
    for name, settings in _split(texts):
        if name in (BASELINE, RECORDING) or any(arm.name == name for arm in arms):
            raise ConfigError("--features", name, "must be another name for each arm")
        if not name.replace("_", "").replace("-", "").replace(".", "").isalnum():
            raise ConfigError("--features", name, "must be letters, digits, '_', '-' and '.'")
        arms.append(_arm(name, settings))
    if not arms:
        raise ConfigError("--features", None, "at least one feature is needed", ", ".join(FEATURES))
    return arms


def combine(arms: Sequence[Arm], combinations: Iterable[str]) -> list[Arm]:
    """Arms of `--combine a+b`: the settings of several of `arms` together; `all` is every one of them.

    Raises:
        ConfigError: a part is not among the features, or two parts set one key to different values.
    """
    by_name = {arm.name: arm for arm in arms}
    combined: list[Arm] = []
    for text in combinations:
        is_all = text.strip() == ALL and ALL not in by_name
        parts = list(by_name) if is_all else [part.strip() for part in text.split("+")]
        if unknown := [part for part in parts if part not in by_name]:
            raise ConfigError("--combine", text, f"{unknown[0]!r} is not in --features", ", ".join(by_name))
        name = ALL if is_all else "+".join(parts)
        if len(parts) < 2 or len(set(parts)) < len(parts) or any(arm.name == name for arm in combined):
            raise ConfigError("--combine", text, "must be two or more different features, named once")
        combined.append(_combination(name, [by_name[part] for part in parts]))
    return combined


def _combination(name: str, arms: Sequence[Arm]) -> Arm:
    keys: dict[str, Any] = {}
    for arm in arms:
        for key, value in arm.keys.items():
            if key in keys and keys[key] != value:
                rule = f"its features set {key} to {keys[key]} and to {value}"
                raise ConfigError("--combine", name, rule)
            keys[key] = value
    tolerances = [arm.tolerance for arm in arms]
    tolerance = Tolerance(
        _sum_of_known([t.loss for t in tolerances]),
        _sum_of_known([t.grad_norm for t in tolerances]),
        _sum_of_known([t.loss_16bit for t in tolerances]),
        _sum_of_known([t.grad_norm_16bit for t in tolerances]),
    )
    return Arm(name, tuple(feature for arm in arms for feature in arm.features), keys, tolerance)


def _sum_of_known(values: Sequence[float | None]) -> float | None:
    """Differences add up at most; None where one is not bounded."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _split(texts: Iterable[str]) -> list[tuple[str, list[str]]]:
    """(name, settings) of every feature. A comma inside brackets belongs to a value; a part `key=value` without a
    colon before its `=` belongs to the feature before it."""
    found: list[tuple[str, list[str]]] = []
    for text in texts:
        for part in _outside_brackets(text):
            before, equals, _ = part.partition("=")
            if equals and ":" not in before:
                if not found:
                    raise ConfigError("--features", part, "settings follow a name", f"NAME:{part}")
                found[-1][1].append(part)
            else:
                name, _, setting = part.partition(":")
                found.append((name.strip(), [setting] if setting else []))
    return found


def _outside_brackets(text: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += character
    return [part for part in (*parts, current.strip()) if part]


def _arm(name: str, settings: Sequence[str]) -> Arm:
    keys = dict(_setting(text) for text in settings)
    feature = FEATURES.get(name)
    if feature is not None:
        return _of_the_map(feature, keys)
    if not keys:
        near = get_close_matches(name, FEATURES, n=1, cutoff=0.0)
        rule = "is no feature of the map; one of your own is written NAME:section.key=value"
        raise ConfigError("--features", name, rule, near[0] if near else None)
    return Arm(name, (name,), keys, Tolerance())


def _of_the_map(feature: Feature, keys: Mapping[str, Any]) -> Arm:
    """A feature of the map; values that depend on a run ({budget}) have to be given."""
    merged = {**feature.keys, **keys}
    for key, value in merged.items():
        if "{" in str(value) and key not in keys:
            rule = f"the value of {key} depends on the run; write {feature.id}:{key}=VALUE"
            raise ConfigError("--features", feature.id, rule)
    return Arm(feature.id, (feature.id,), merged, Tolerance(**feature.tolerance))


def _setting(text: str) -> tuple[str, Any]:
    """(section.key, value) of an override; deeper paths become a nested value."""
    ((section, content),) = parse_override(text).items()
    ((key, value),) = content.items()
    return f"{section}.{key}", value
