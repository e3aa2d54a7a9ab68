"""Lengths and tokens: every sample is in one class, and classes are few and round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from many_ranks import write_many_ranks
from paceline.report.charts_lengths import class_width, histogram, length_chart, quantile, tokens_per_rank
from paceline.report.run_data import SampleFile, load_run
from paceline.report.words import Words

WORDS = Words("en")


@given(st.lists(st.integers(0, 50_000), min_size=1, max_size=200))
def test_shares_of_a_histogram_add_up_to_all(lengths):
    width = class_width(max(lengths))
    classes = histogram(lengths, width)
    assert sum(classes.values()) == pytest.approx(1.0)
    assert len(range(0, max(lengths) + 1, width)) <= 40
    assert all(any(start <= length < start + width for length in lengths) for start in classes)


@pytest.mark.parametrize(("longest", "width"), [(0, 1), (39, 1), (40, 2), (80, 5), (1000, 50), (8191, 500)])
def test_classes_are_one_two_or_five_times_a_power_of_ten(longest, width):
    assert class_width(longest) == width


def test_quantiles_are_values_that_occur():
    assert quantile([1, 2, 3, 4], 0.5) == 2
    assert quantile([7], 0.9) == 7
    assert quantile(range(1, 101), 0.9) == 90


def test_the_first_and_last_step_are_drawn_and_said():
    files = [
        SampleFile(1, tuple({"num_tokens": n} for n in (3, 4, 9))),
        SampleFile(8, tuple({"num_tokens": n} for n in (5, 5, 5, 30))),
    ]
    chart = length_chart(files, WORDS)
    assert [trace.name for trace in chart.figure.data] == ["step 1", "step 8"]
    assert sum(chart.figure.data[1].y) == pytest.approx(1.0)
    assert "the longest 30" in chart.caption


def test_samples_without_lengths_have_no_chart():
    assert length_chart([SampleFile(1, ({"num_tokens": None}, {}))], WORDS) is None


def test_tokens_of_ranks_are_drawn_as_least_mean_and_most(tmp_path):
    run = load_run(write_many_ranks(tmp_path / "run", 3, 4))
    least, mean, most = tokens_per_rank(run, WORDS).figure.data
    assert least.y == mean.y == most.y == (80_000,) * 4
