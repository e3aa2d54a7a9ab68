"""Equal arms: how often a difference is called where there is none.

`aa_noise.json` holds runs of one configuration, one after the other on a busy two-core machine: the seconds of each
run's steps, warm-up dropped. Every simulated ablation deals such runs out to arms that do not differ, and goes through
the whole comparison.
"""

import json
import random
from pathlib import Path
from statistics import fmean

import pytest

from paceline.lab.plan import order_of_round
from paceline.lab.results import BASELINE
from paceline.lab.statistics import corrected_ratios, verdict_of

RECORDED = json.loads((Path(__file__).parent / "aa_noise.json").read_text())
RUNS: list[list[float]] = [run["step_s"] for run in RECORDED["runs"]]
ALPHA, MARGIN, TRIALS = 0.05, 0.02, 1500


def false_call(columns: list[list[float]]) -> bool:
    """Whether any arm of columns[1:] is called faster or slower than columns[0]."""
    ratios = corrected_ratios([(columns[0], column) for column in columns[1:]], ALPHA)
    verdicts = {verdict_of(ratio, len(columns[0]), ALPHA, MARGIN) for ratio in ratios}
    return bool(verdicts & {"faster", "slower"})


def resampled(run: list[float], draw: random.Random) -> float:
    """Mean step seconds of a run with its steps drawn again."""
    return fmean(draw.choices(run, k=len(run)))


def by_arm(values: list[float], num_arms: int) -> list[list[float]]:
    """Values in the order in which they were run, dealt out as an ablation's rounds are."""
    names = [BASELINE, *(f"a{index}" for index in range(1, num_arms))]
    columns: dict[str, list[float]] = {name: [] for name in names}
    for number in range(len(values) // num_arms):
        for position, name in enumerate(order_of_round(names, number)):
            columns[name].append(values[number * num_arms + position])
    return [columns[name] for name in names]


def test_the_recorded_noise_is_noise() -> None:
    """Runs of one configuration that differ: without that the simulations below would prove nothing."""
    means = [fmean(run) for run in RUNS]
    assert len(RUNS) >= 20 and all(len(run) >= 8 for run in RUNS)
    assert max(means) / min(means) > 1.02


@pytest.mark.parametrize("num_features", [1, 3, 5])
@pytest.mark.parametrize("num_pairs", [4, 6, 10])
def test_runs_dealt_out_at_random_are_called_different_at_most_as_often_as_allowed(
    num_features: int, num_pairs: int
) -> None:
    draw = random.Random(f"{num_features} {num_pairs}")
    calls = 0
    for _ in range(TRIALS):
        values = [
            resampled(draw.choice(RUNS), draw) * draw.gauss(1.0, 1e-3)
            for _ in range((num_features + 1) * num_pairs)
        ]
        calls += false_call(by_arm(values, num_features + 1))
    assert calls / TRIALS <= ALPHA


@pytest.mark.parametrize("num_features", [1, 3])
def test_runs_in_their_recorded_order_are_called_different_at_most_as_often_as_allowed(
    num_features: int,
) -> None:
    """The machine's own drift stays in: neighbours in time stay neighbours."""
    draw = random.Random(num_features)
    calls = 0
    for _ in range(TRIALS):
        start = draw.randrange(len(RUNS))
        ordered = [*RUNS[start:], *RUNS[:start]]
        ordered = ordered[:: draw.choice([1, -1])]
        size = len(ordered) // (num_features + 1) * (num_features + 1)
        columns = by_arm([resampled(run, draw) for run in ordered[:size]], num_features + 1)
        draw.shuffle(columns)
        calls += false_call(columns)
    assert calls / TRIALS <= ALPHA


@pytest.mark.parametrize("num_pairs", [4, 6])
def test_a_machine_with_two_speeds_is_not_taken_for_a_feature(num_pairs: int) -> None:
    draw = random.Random(num_pairs)
    calls = 0
    for _ in range(TRIALS):
        values = [draw.choice([1.0, 1.3]) * draw.gauss(1.0, 0.005) for _ in range(6 * num_pairs)]
        calls += false_call(by_arm(values, 6))
    assert calls / TRIALS <= ALPHA


def test_a_steady_drift_is_not_taken_for_a_feature() -> None:
    draw = random.Random(0)
    calls = 0
    for _ in range(TRIALS):
        slope = draw.uniform(-0.02, 0.02)
        values = [(1.0 + slope * index) * draw.gauss(1.0, 0.01) for index in range(6 * 6)]
        calls += false_call(by_arm(values, 6))
    assert calls / TRIALS <= ALPHA


def test_a_real_difference_is_called() -> None:
    """The same noise with a feature that saves 60 %: the caution above does not cost everything."""
    draw = random.Random(1)
    calls = 0
    for _ in range(200):
        columns = by_arm([resampled(draw.choice(RUNS), draw) for _ in range(6 * 10)], 6)
        columns[2] = [0.4 * value for value in columns[2]]
        calls += false_call(columns)
    assert calls / 200 > 0.6


def test_steps_taken_as_observations_would_break_the_promise() -> None:
    """Why a pair of runs counts once: t over the paired steps of two equal runs calls a difference most of the time."""
    draw = random.Random(2)
    calls = 0
    for _ in range(300):
        first, second = draw.sample(RUNS, 2)
        (ratio,) = corrected_ratios([(first, second)], ALPHA)
        calls += verdict_of(ratio, len(first), ALPHA, MARGIN) in ("faster", "slower")
    assert calls / 300 > 4 * ALPHA
