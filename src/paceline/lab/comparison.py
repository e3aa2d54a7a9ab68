"""An arm against the baseline: times with corrected intervals, figures, correctness, and what was predicted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from paceline.lab.arms import Arm, Tolerance
from paceline.lab.measurements import FIGURES, Measurement, arm_figures, same_sample_steps
from paceline.lab.predictions import Saved, predict
from paceline.lab.results import (
    AblationRow,
    Correctness,
    CorrectnessReason,
    DifferenceInterval,
    FigureChange,
    RatioInterval,
    RolloutMode,
    StageChange,
)
from paceline.lab.statistics import corrected_ratios, paired_difference, paired_ratio, verdict_of

Runs = Mapping[int, Measurement]
"""An arm's finished runs by round."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What all rows have in common."""

    kept: tuple[int, ...]
    all_steps: tuple[int, ...]
    alpha: float
    margin: float
    mode: RolloutMode
    is_supervised: bool
    saved: Mapping[str, Saved]
    """What the diagnosis says each feature saves, by feature."""
    dtype: str = "float32"
    """Working precision of the model, which tolerances depend on."""


def compare_arms(
    comparison: Comparison,
    baseline: Runs,
    arms: Sequence[tuple[Arm, Runs]],
    failures: Mapping[str, tuple[int, str]],
) -> list[AblationRow]:
    """One row per arm. Step times are corrected for the number of arms together; intervals of stages and figures are
    not, and carry no verdict. `failures`: by arm, the number of runs that did not finish, and the last message."""
    pairs = [(arm, _paired(baseline, runs)) for arm, runs in arms]
    ratios = corrected_ratios(
        [_step_columns(found, comparison.kept) if found else None for _, found in pairs], comparison.alpha
    )
    repeat = _largest_differences(comparison, list(pairwise(baseline[key] for key in sorted(baseline))))
    return [
        _row(comparison, arm, found, ratio, repeat, failures.get(arm.name, (0, "")))
        for (arm, found), ratio in zip(pairs, ratios, strict=True)
    ]


Pairs = list[tuple[Measurement, Measurement]]


def _paired(baseline: Runs, runs: Runs) -> Pairs:
    return [(baseline[key], runs[key]) for key in sorted(baseline.keys() & runs.keys())]


def _step_columns(pairs: Pairs, kept: Sequence[int]) -> tuple[list[float], list[float]]:
    return [base.step_s(kept) for base, _ in pairs], [feature.step_s(kept) for _, feature in pairs]


def _row(
    comparison: Comparison,
    arm: Arm,
    pairs: Pairs,
    ratio: RatioInterval | None,
    repeat: "Differences | None",
    failure: tuple[int, str],
) -> AblationRow:
    kept = comparison.kept
    features = [feature for _, feature in pairs]
    return AblationRow(
        name=arm.name,
        features=arm.features,
        keys=dict(arm.keys),
        num_pairs=len(pairs),
        num_failed=failure[0],
        step_time=ratio,
        verdict=verdict_of(ratio, len(pairs), comparison.alpha, comparison.margin),
        saved_s=None if ratio is None else _saved(ratio, _step_columns(pairs, kept)[0]),
        stages=_stage_changes(comparison, pairs),
        figures=_figure_changes(comparison, pairs),
        predicted=predict(comparison.saved, arm.features, [base.step_s(kept) for base, _ in pairs]),
        correctness=judge(comparison, arm.tolerance.at(comparison.dtype), pairs, repeat),
        arm=arm_figures(arm.name, features, kept),
        message=failure[1],
    )


def _saved(ratio: RatioInterval, baseline_s: Sequence[float]) -> DifferenceInterval:
    """Seconds per step that a ratio means on the baseline's mean step; so it says what the ratio's interval says."""
    step_s = fmean(baseline_s)
    low = None if ratio.high is None else step_s * (1.0 - ratio.high)
    high = None if ratio.low is None else step_s * (1.0 - ratio.low)
    return DifferenceInterval(step_s * (1.0 - ratio.ratio), low, high, ratio.level)


def _stage_changes(comparison: Comparison, pairs: Pairs) -> dict[str, StageChange]:
    found = [(base.stage_s(comparison.kept), feature.stage_s(comparison.kept)) for base, feature in pairs]
    stages = dict.fromkeys(stage for pair in found for side in pair for stage in side)
    changes = {}
    for stage in stages:
        base = [side.get(stage, 0.0) for side, _ in found]
        feature = [side.get(stage, 0.0) for _, side in found]
        difference = paired_difference(base, feature, 1.0 - comparison.alpha)
        changes[stage] = StageChange(sum(base) / len(base), sum(feature) / len(feature), difference)
    return changes


def _figure_changes(comparison: Comparison, pairs: Pairs) -> dict[str, FigureChange]:
    found = [(base.figures(comparison.kept), feature.figures(comparison.kept)) for base, feature in pairs]
    level = 1.0 - comparison.alpha
    changes = {}
    for name in FIGURES:
        having = [(base[name], feature[name]) for base, feature in found if name in base and name in feature]
        if not having:
            continue
        base, feature = [list(column) for column in zip(*having, strict=True)]
        are_positive = all(value > 0 for pair in having for value in pair)
        changes[name] = FigureChange(
            sum(base) / len(base),
            sum(feature) / len(feature),
            paired_difference(base, feature, level),
            paired_ratio(base, feature, level) if are_positive and name not in ("reward", "loss") else None,
        )
    return changes


@dataclass(frozen=True, slots=True)
class Differences:
    """Largest difference of loss (nats) and gradient norm (relative) over the compared steps of some pairs of runs."""

    loss: float
    grad_norm: float | None
    num_steps: int


def judge(
    comparison: Comparison, tolerance: Tolerance, pairs: Pairs, repeat: Differences | None
) -> Correctness:
    """Whether an arm's updates are the baseline's, as far as its tolerance says they should be."""
    if not pairs:
        return _judged("no_pairs", tolerance, None, repeat, None)
    found = _largest_differences(comparison, pairs)
    if found is None:
        return _judged("inputs_differ", tolerance, None, repeat, same_samples=False)
    if not math.isfinite(found.loss) or not math.isfinite(found.grad_norm or 0.0):
        finite = Differences(math.inf, None, found.num_steps)
        return _judged("not_finite", tolerance, finite, repeat, same_samples=True)
    reason: CorrectnessReason = "within_tolerance"
    if tolerance.loss is None:
        reason = "no_stated_tolerance"
    elif _exceeds(found, tolerance):
        repeatable = repeat is None or not _exceeds(repeat, tolerance)
        reason = "beyond_tolerance" if repeatable else "baseline_not_repeatable"
    return _judged(reason, tolerance, found, repeat, same_samples=True)


def _exceeds(found: Differences, tolerance: Tolerance) -> bool:
    norm, bound = found.grad_norm, tolerance.grad_norm
    return (tolerance.loss is not None and found.loss > tolerance.loss) or (
        norm is not None and bound is not None and norm > bound
    )


def _judged(
    reason: CorrectnessReason,
    tolerance: Tolerance,
    found: Differences | None,
    repeat: Differences | None,
    same_samples: bool | None,
) -> Correctness:
    passed, failed = reason == "within_tolerance", reason in ("beyond_tolerance", "not_finite")
    return Correctness(
        status="passed" if passed else "failed" if failed else "not_checked",
        reason=reason,
        tolerance=tolerance.loss,
        loss_difference=None if found is None else _finite(found.loss),
        grad_norm_difference=None if found is None else _finite(found.grad_norm),
        repeat_loss_difference=None if repeat is None else _finite(repeat.loss),
        same_samples=same_samples,
        grad_norm_tolerance=tolerance.grad_norm,
        repeat_grad_norm_difference=None if repeat is None else _finite(repeat.grad_norm),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _largest_differences(comparison: Comparison, pairs: Pairs) -> Differences | None:
    """Over the steps that both runs of a pair trained on the same samples, counted from the first; None where there is
    no such step."""
    loss, norm, compared = 0.0, None, 0
    for base, feature in pairs:
        steps = comparison.all_steps
        if comparison.mode == "sample" and not comparison.is_supervised:
            steps = steps[: same_sample_steps(base.folder, feature.folder, steps)]
        for step in steps:
            ours, theirs = feature.metrics.get(step, {}), base.metrics.get(step, {})
            if "loss/total" not in ours or "loss/total" not in theirs:
                continue
            compared += 1
            loss = _larger(loss, abs(ours["loss/total"] - theirs["loss/total"]))
            if "grad_norm" in ours and theirs.get("grad_norm"):
                norm = _larger(norm or 0.0, abs(ours["grad_norm"] / theirs["grad_norm"] - 1.0))
    return Differences(loss, norm, compared) if compared else None


def _larger(first: float, second: float) -> float:
    """Not a number wins: it must not hide behind a comparison."""
    return math.nan if math.isnan(first) or math.isnan(second) else max(first, second)
