"""What the diagnosis of the baseline's runs says features save, to be set against what was measured."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from paceline.diagnosis import predict as predict_switch
from paceline.diagnosis.features import FEATURES
from paceline.lab.results import Prediction

Saved = tuple[float, float, float]
"""Seconds per step: expected, and the ends of the interval."""


def saved_by_feature(baseline: Sequence[Path], features: Iterable[str]) -> dict[str, Saved]:
    """Means over the baseline's runs; a feature is missing where it is not of the map, or a run has nothing that it
    reduces."""
    found: dict[str, Saved] = {}
    for feature in features:
        if feature not in FEATURES:
            continue
        switches = [predict_switch(folder, feature) for folder in baseline]
        named = [switch for switch in switches if switch is not None]
        if named and len(named) == len(switches):
            found[feature] = (
                fmean(switch.saved_s for switch in named),
                fmean(switch.low for switch in named),
                fmean(switch.high for switch in named),
            )
    return found


def predict(
    saved: Mapping[str, Saved], features: Sequence[str], baseline_s: Sequence[float]
) -> Prediction | None:
    """What features save together, on runs whose steps take `baseline_s`; None where nothing is predicted of any, or
    where one is not of the map.

    What is left of a step after each is multiplied: two features that halve the same step leave a quarter. In a
    combination a feature that reduces no cost of the baseline leaves it as it is.
    """
    known = [saved[feature] for feature in features if feature in saved]
    if not known or not baseline_s or any(feature not in FEATURES for feature in features):
        return None
    step_s = fmean(baseline_s)
    ratio, low, high = 1.0, 1.0, 1.0
    for expected, least, most in known:
        ratio *= max(0.0, 1.0 - expected / step_s)
        low *= max(0.0, 1.0 - most / step_s)
        high *= max(0.0, 1.0 - least / step_s)
    return Prediction((1.0 - ratio) * step_s, (1.0 - high) * step_s, (1.0 - low) * step_s, ratio, low, high)
