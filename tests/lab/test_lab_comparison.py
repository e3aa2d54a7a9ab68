"""Rows of an ablation from runs whose figures are known."""

import json
import math
from pathlib import Path

import pytest

from paceline.lab.arms import Arm, Tolerance
from paceline.lab.comparison import Comparison, compare_arms
from paceline.lab.measurements import Measurement, same_sample_steps
from paceline.lab.predictions import predict

STEPS = (1, 2, 3, 4)
TIGHT = Tolerance(loss=1e-5, grad_norm=1e-3)


def comparison(mode="replay") -> Comparison:
    return Comparison((3, 4), STEPS, 0.05, 0.02, mode, False, saved={"predicted": (1.0, 0.5, 1.5)})


def run(step_s: float, update_s: float = 1.0, folder: Path = Path(), **metrics) -> Measurement:
    """A run whose first two steps are slow, as warm-up is."""
    values = {
        "time/step": step_s,
        "time/update_actor": update_s,
        "throughput/tokens_per_s_per_device": 100.0 / step_s,
        "tokens/effective_share": 0.8,
        "memory/host_rss": 1e9,
        "memory/peak_allocated": 0.0,
        "reward/mean": 0.5,
        "loss/total": 0.01,
        "grad_norm": 2.0,
        **{name.replace("__", "/"): value for name, value in metrics.items()},
    }
    slow = {**values, "time/step": 50.0, "time/update_actor": 49.0}
    return Measurement(folder, {1: slow, 2: slow, 3: values, 4: values})


def rows_of(arms, baseline, tolerance=TIGHT, **kind):
    named = [(Arm(name, (name,), {}, tolerance), runs) for name, runs in arms.items()]
    return compare_arms(comparison(**kind), baseline, named, {})


BASE = {0: run(4.0, 3.0), 1: run(4.4, 3.2), 2: run(3.9, 2.9), 3: run(4.1, 2.9)}


def test_a_feature_is_compared_with_the_baseline_of_its_own_round() -> None:
    """Rounds differ by ten per cent, the feature saves a quarter in each: without pairing the first would hide it."""
    feature = {key: run(0.75 * base.step_s((3,)) + 0.01 * key, 2.0) for key, base in BASE.items()}
    (row,) = rows_of({"quick": feature}, BASE)
    assert row.num_pairs == 4 and row.verdict == "faster"
    assert row.step_time is not None and row.step_time.ratio == pytest.approx(0.7535, abs=0.002)
    assert row.saved_s is not None and row.saved_s.mean == pytest.approx(1.01, abs=0.05)
    assert row.saved_s.level == row.step_time.level
    assert row.saved_s.low is not None and row.saved_s.low > 0.0  # as the ratio's interval lies below 1
    update = row.stages["update_actor"]
    assert update.difference_s.mean == pytest.approx(2.0 - 3.0)
    assert row.figures["tokens_per_s_per_device"].ratio is not None
    assert row.figures["peak_memory"].ratio is None  # 0 on a CPU
    assert row.figures["reward"].difference.mean == 0.0


def test_steps_that_do_not_count_are_in_no_time() -> None:
    (row,) = rows_of({"same": BASE}, BASE)
    assert row.arm is not None and row.arm.step_s == pytest.approx(4.1)
    assert row.verdict == "no_difference" and row.step_time is not None and row.step_time.ratio == 1.0


def test_rounds_that_one_side_lacks_are_in_no_pair() -> None:
    (row,) = rows_of({"once": {1: run(2.0)}}, BASE)
    assert row.num_pairs == 1 and row.verdict == "undecided"
    (row,) = rows_of({"never": {}}, BASE)
    assert row.num_pairs == 0 and row.arm is None and row.correctness.reason == "no_pairs"


@pytest.mark.parametrize(
    ("changes", "status", "reason"),
    [
        ({}, "passed", "within_tolerance"),
        ({"loss__total": 0.010009}, "passed", "within_tolerance"),
        ({"loss__total": 0.0102}, "failed", "beyond_tolerance"),
        ({"grad_norm": 2.001}, "passed", "within_tolerance"),
        ({"grad_norm": 2.1}, "failed", "beyond_tolerance"),
        ({"loss__total": math.nan}, "failed", "not_finite"),
        ({"grad_norm": math.inf}, "failed", "not_finite"),
    ],
)
def test_a_feature_that_changes_the_update_beyond_its_tolerance_fails(changes, status, reason) -> None:
    feature = {key: run(2.0 + 0.01 * key, **changes) for key in BASE}
    (row,) = rows_of({"f": feature}, BASE)
    assert (row.correctness.status, row.correctness.reason) == (status, reason)
    json.dumps(row.correctness.loss_difference, allow_nan=False)


def test_a_difference_in_a_warm_up_step_counts_for_correctness() -> None:
    wrong = run(2.0)
    first = {**wrong.metrics[1], "loss/total": 5.0}
    feature = {0: Measurement(Path(), {**wrong.metrics, 1: first}), 1: run(2.1)}
    (row,) = rows_of({"f": feature}, BASE)
    assert row.correctness.status == "failed" and row.correctness.loss_difference == pytest.approx(4.99)


def test_no_tolerance_is_no_judgement() -> None:
    (row,) = rows_of({"f": {0: run(2.0, loss__total=3.0)}}, BASE, tolerance=Tolerance())
    assert (row.correctness.status, row.correctness.reason) == ("not_checked", "no_stated_tolerance")
    assert row.correctness.loss_difference == pytest.approx(2.99)


def test_a_baseline_that_does_not_repeat_itself_accuses_no_feature() -> None:
    unsteady = {0: run(4.0), 1: run(4.1, grad_norm=2.4), 2: run(3.9)}
    (row,) = rows_of({"f": {0: run(2.0, grad_norm=2.3)}}, unsteady)
    assert row.correctness.reason == "baseline_not_repeatable"
    assert row.correctness.repeat_grad_norm_difference == pytest.approx(0.2)


def write_samples(folder: Path, completions: dict[int, str]) -> Path:
    (folder / "samples").mkdir(parents=True)
    for step, completion in completions.items():
        row = {"prompt_id": "p", "sample_index": 0, "seed": 1, "completion": completion}
        (folder / "samples" / f"step{step}.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def test_losses_of_different_samples_are_not_compared(tmp_path: Path) -> None:
    """Runs that sample anew are compared as long as they have sampled the same."""
    base = write_samples(tmp_path / "base", dict.fromkeys(STEPS, "a"))
    later = write_samples(tmp_path / "later", {1: "a", 2: "a", 3: "b", 4: "a"})
    other = write_samples(tmp_path / "other", dict.fromkeys(STEPS, "b"))
    assert same_sample_steps(base, later, STEPS) == 2 and same_sample_steps(base, other, STEPS) == 0
    runs = {0: run(4.0, folder=base), 1: run(4.1, folder=base)}
    feature = run(2.0, folder=later)
    changed = {step: {**values} for step, values in feature.metrics.items()}
    changed[3]["loss/total"] = 7.0
    arms = {"later": {0: Measurement(later, changed)}, "other": {0: run(2.0, folder=other)}}
    first, second = rows_of(arms, runs, mode="sample")
    assert first.correctness.status == "passed"
    assert second.correctness.reason == "inputs_differ" and second.correctness.same_samples is False


def test_predictions_of_several_features_multiply_what_they_leave() -> None:
    saved = {"packing": (2.0, 1.0, 3.0), "no_recompute": (5.0, 4.0, 6.0)}
    one = predict(saved, ("packing",), [9.0, 11.0])
    assert one is not None and (one.saved_s, one.low_s, one.high_s) == pytest.approx((2.0, 1.0, 3.0))
    assert one.ratio == pytest.approx(0.8)
    both = predict(saved, ("packing", "no_recompute"), [10.0])
    assert both is not None and both.ratio == pytest.approx(0.8 * 0.5)
    assert both.saved_s == pytest.approx(6.0)
    assert predict(saved, ("packing", "async_checkpoint"), [10.0]) == one  # no cost that the second reduces
    assert predict(saved, ("async_checkpoint",), [10.0]) is None
    assert predict(saved, ("packing", "one of my own"), [10.0]) is None
    assert predict(saved, ("packing",), []) is None


def test_steps_under_the_profiler_are_known_from_the_metrics() -> None:
    metrics = {step: {"time/step": 1.0, "profiled": float(step == 2)} for step in (1, 2, 3)}
    assert Measurement(Path(), metrics).profiled == {2}
    assert run(4.0).profiled == set()
