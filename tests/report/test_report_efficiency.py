"""MFU against waiting: the correlation is Pearson's, and nothing is called a correlation that chance explains."""

import math
import random

import numpy as np
import pytest
from report_runs import RunWriter

from paceline.report.charts_efficiency import correlation, mfu_against_waiting, step_points
from paceline.report.charts_roofline import roofline_chart
from paceline.report.run_data import load_run
from paceline.report.words import Words
from paceline.telemetry.ceilings import Ceilings
from paceline.telemetry.roofline import Roofline, StageRoofline

WORDS = Words("en")


def test_the_correlation_is_pearsons():
    noise = random.Random(3)
    points = [(x, 3 - 2 * x + noise.gauss(0, 0.4)) for x in (noise.random() for _ in range(40))]
    found = correlation(points)
    assert found.r == pytest.approx(np.corrcoef(np.array(points).T)[0, 1])
    z = math.atanh(found.r)
    assert math.atanh(found.low) == pytest.approx(z - 1.959963984540054 / math.sqrt(37))
    assert found.low < found.r < found.high < 0


@pytest.mark.parametrize("points", [[(0.1, 1.0)] * 30, [(0.1, 0.2), (0.2, 0.3), (0.3, 0.1)], []])
def test_what_does_not_vary_or_is_too_few_has_no_correlation(points):
    assert correlation(points) is None


def test_a_perfect_line_is_a_correlation_of_one():
    found = correlation([(float(x), 2.0 * x) for x in range(9)])
    assert (found.r, found.low, found.high) == pytest.approx((1.0, 1.0, 1.0))


def test_intervals_hold_the_truth_as_often_as_they_say():
    noise = random.Random(7)
    hits = 0
    for _ in range(400):
        points = [(noise.gauss(0, 1), noise.gauss(0, 1)) for _ in range(25)]
        found = correlation(points)
        hits += found.low <= 0.0 <= found.high
    assert 0.91 < hits / 400 < 0.985


def test_points_are_steps_with_their_waiting_share(tmp_path):
    run = load_run(RunWriter(tmp_path / "run", num_steps=8, device_name="NVIDIA H200").write_all())
    points, is_mfu = step_points(run)
    step = run.steps[2]
    waited = step.unaccounted_s + step.stages["reward"].self_s + step.stages["data"].self_s
    assert is_mfu
    assert points[2].waiting == pytest.approx(waited / step.wall_s)
    assert points[2].rate == pytest.approx((7e11 + 4.1e12) / step.wall_s / 989e12, rel=0.01)
    assert "%" in mfu_against_waiting(run, WORDS).caption


def test_unknown_hardware_shows_rates_instead_of_mfu(tmp_path):
    run = load_run(RunWriter(tmp_path / "run", num_steps=8).write_all())
    assert mfu_against_waiting(run, WORDS).title == "TFLOP/s against waiting time"


def stage(name, intensity):
    return StageRoofline(name, 1.0, 100.0, 50.0, intensity, 0.1, 0.2, "memory", 0.2)


def test_the_roof_bends_where_bandwidth_and_arithmetic_meet():
    ceilings = Ceilings("device", "2.13", {"bfloat16": 800.0}, 4000.0)
    chart = roofline_chart(Roofline((stage("update_actor", 10.0),), 800.0, 4000.0, ceilings), WORDS)
    roof, point = chart.figure.data
    assert roof.x[1] == pytest.approx(200.0) and roof.y[1] == 800.0
    assert roof.y[0] == pytest.approx(roof.x[0] * 4.0)
    assert (point.x[0], point.y[0]) == (10.0, 100.0)
    assert "measured" in chart.caption


def test_without_ceilings_there_is_no_roof():
    assert roofline_chart(Roofline((stage("update_actor", 10.0),), None, None, None), WORDS) is None
