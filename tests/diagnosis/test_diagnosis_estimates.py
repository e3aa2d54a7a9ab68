"""Means, trends and the line through micro-batches, against what they are known to be."""

import numpy as np
import pytest

from paceline.diagnosis.estimates import cost_of, fit_passes, mean_of, t_quantile, trend


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (9, 2.262), (30, 2.042)]
)
def test_t_quantiles_are_those_of_the_tables(degrees: int, quantile: float):
    assert t_quantile(degrees) == pytest.approx(quantile, rel=0.01)


def test_the_interval_of_a_mean_holds_it_nineteen_times_in_twenty():
    rng = np.random.default_rng(0)
    held = [one.low <= 3.0 <= one.high for one in (mean_of(rng.normal(3.0, 1.0, 5)) for _ in range(2000))]
    assert 0.935 <= np.mean(held) <= 0.965


def test_a_cost_is_never_negative_and_one_observation_has_no_spread():
    assert cost_of([-1.0, 1.0]).low == 0.0
    assert mean_of([2.0]) == mean_of([2.0, 2.0])


def test_a_trend_is_found_through_outliers_and_not_in_noise():
    rng = np.random.default_rng(1)
    steps = list(range(1, 41))
    noise = rng.normal(0.0, 0.1, 40)
    rising = 2.0 + 0.05 * np.array(steps) + noise
    rising[[5, 20]] += 30.0
    slope = trend(steps, rising.tolist())
    assert slope is not None and slope.value == pytest.approx(0.05, rel=0.15) and slope.low > 0.0
    flat = trend(steps, (2.0 + noise).tolist())
    assert flat is not None and flat.low < 0.0 < flat.high
    assert trend([1, 2, 3], [1.0, 2.0, 3.0]) is None


def test_the_fixed_cost_of_a_micro_batch_is_told_apart_through_hiccups_where_sizes_differ():
    rng = np.random.default_rng(2)
    slots = rng.integers(100, 1000, 400)
    seconds = 0.02 + 1e-4 * slots + np.where(rng.random(400) < 0.1, 0.5, 0.0)
    times = fit_passes(slots.tolist(), seconds.tolist())
    assert times is not None and times.is_separable
    assert times.fixed_s == pytest.approx(0.02, rel=0.1) and times.per_slot_s == pytest.approx(1e-4, rel=0.05)


def test_nothing_is_told_apart_where_sizes_are_alike():
    times = fit_passes([512.0] * 20, [0.1] * 20)
    assert times is not None and not times.is_separable and times.fixed_s == 0.0
    assert fit_passes([], []) is None


def test_passes_whose_sizes_were_not_recorded_have_no_line() -> None:
    times = fit_passes([0.0] * 12, [0.1] * 12)
    assert times is not None
    assert not times.is_separable
