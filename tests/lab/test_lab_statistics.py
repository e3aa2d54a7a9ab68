"""Intervals, corrections and verdicts of paired runs."""

import math
from statistics import fmean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.lab.results import RatioInterval
from paceline.lab.statistics import (
    RESERVE,
    corrected_ratios,
    holm,
    paired_difference,
    paired_ratio,
    verdict_of,
)
from paceline.lab.student_t import critical_value, two_sided_p

ALPHA = 0.05

seconds = st.floats(0.01, 1e4)
pair_lists = st.lists(st.tuples(seconds, seconds), min_size=2, max_size=8)
p_lists = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8)


# values of standard tables of the t distribution
@pytest.mark.parametrize(
    ("alpha", "df", "t"),
    [
        (0.05, 1, 12.7062047),
        (0.05, 2, 4.3026527),
        (0.05, 5, 2.5705818),
        (0.01, 4, 4.6040949),
        (0.05, 30, 2.0422725),
        (0.001, 10, 4.5868939),
        (0.05, 1000, 1.9623391),
    ],
)
def test_critical_values_are_those_of_the_tables(alpha: float, df: int, t: float) -> None:
    assert critical_value(alpha, df) == pytest.approx(t, rel=1e-7)


def test_one_degree_of_freedom_is_the_cauchy_distribution() -> None:
    for t in (1e-6, 0.3, 1.0, 7.0, 1e6):
        assert two_sided_p(t, 1) == pytest.approx(1.0 - 2.0 / math.pi * math.atan(t), rel=1e-9, abs=1e-15)


@given(st.floats(1e-6, 0.999), st.integers(1, 60))
def test_critical_values_invert_p_values(alpha: float, df: int) -> None:
    assert two_sided_p(critical_value(alpha, df), df) == pytest.approx(alpha, rel=1e-6)


def test_an_interval_is_mean_and_standard_error_times_the_critical_value() -> None:
    differences = [0.5, -0.25, 1.0, 0.75]
    interval = paired_difference([1.0] * 4, [1.0 + d for d in differences], 0.95)
    half = 3.1824463 * stdev(differences) / 2.0
    assert interval.mean == pytest.approx(0.5)
    assert interval.high == pytest.approx(fmean(differences) + half)
    assert interval.low == pytest.approx(fmean(differences) - half)


@given(pair_lists)
def test_swapping_baseline_and_feature_inverts_the_ratio(pairs: list[tuple[float, float]]) -> None:
    base, feature = [list(column) for column in zip(*pairs, strict=True)]
    forward, backward = paired_ratio(base, feature, 0.95), paired_ratio(feature, base, 0.95)
    assert forward.ratio * backward.ratio == pytest.approx(1.0)
    assert forward.p_value == pytest.approx(backward.p_value, rel=1e-6, abs=1e-12)
    assert forward.low is not None and backward.high is not None
    if forward.low > 1e-100 and backward.high < 1e100:
        assert forward.low * backward.high == pytest.approx(1.0, rel=1e-6)


@given(pair_lists, st.floats(0.1, 10.0))
def test_a_slow_pair_of_runs_counts_like_a_fast_one(pairs: list[tuple[float, float]], factor: float) -> None:
    """What slows both runs of a pair alike leaves the ratio as it is."""
    base, feature = [list(column) for column in zip(*pairs, strict=True)]
    plain = paired_ratio(base, feature, 0.95)
    slowed = paired_ratio([base[0] * factor, *base[1:]], [feature[0] * factor, *feature[1:]], 0.95)
    assert slowed.ratio == pytest.approx(plain.ratio, rel=1e-9)


@given(pair_lists, st.floats(0.5, 0.999))
def test_an_interval_holds_its_ratio_and_grows_with_its_level(
    pairs: list[tuple[float, float]], level: float
) -> None:
    base, feature = [list(column) for column in zip(*pairs, strict=True)]
    narrow = paired_ratio(base, feature, level)
    wide = paired_ratio(base, feature, level + (1.0 - level) / 2)
    assert narrow.low is not None and narrow.high is not None
    assert wide.low is not None and wide.high is not None
    slack = 1e-9
    assert narrow.low * (1 - slack) <= narrow.ratio <= narrow.high * (1 + slack)
    assert wide.low <= narrow.low * (1 + slack) and narrow.high <= wide.high * (1 + slack)


@given(p_lists)
def test_holm_lies_between_no_correction_and_bonferroni(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    for p_value, corrected in zip(p_values, adjusted, strict=True):
        assert p_value <= corrected <= min(1.0, len(p_values) * p_value) + 1e-12
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    assert [adjusted[i] for i in order] == sorted(adjusted)


@given(p_lists)
def test_holm_rejects_what_its_step_down_procedure_rejects(p_values: list[float]) -> None:
    rejected = set()
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        if p_values[index] * (len(p_values) - rank) > ALPHA:
            break
        rejected.add(index)
    assert {i for i, p in enumerate(holm(p_values)) if p <= ALPHA} == rejected


def test_holm_of_a_published_example() -> None:
    """Three p-values 0.01, 0.02 and 0.03: times 3, 2 and 1, each at least the one before."""
    assert holm([0.02, 0.01, 0.03]) == pytest.approx([0.04, 0.03, 0.04])


@settings(max_examples=40)
@given(
    st.integers(2, 6).flatmap(
        lambda n: st.lists(st.lists(st.floats(0.9, 1.2), min_size=n, max_size=n), min_size=1, max_size=5)
    )
)
def test_a_corrected_interval_excludes_one_exactly_where_holm_rejects(features: list[list[float]]) -> None:
    base = [1.0 + 0.01 * index for index in range(len(features[0]))]
    ratios = corrected_ratios(
        [(base, [b * f for b, f in zip(base, r, strict=True)]) for r in features], ALPHA
    )
    for ratio in ratios:
        assert ratio is not None and ratio.low is not None and ratio.high is not None
        assert ratio.adjusted_p is not None and ratio.level >= 1.0 - ALPHA
        if abs(ratio.adjusted_p - ALPHA) > 1e-6:  # rounding decides on the border
            excluded = not ratio.low <= 1.0 <= ratio.high
            assert excluded == (ratio.adjusted_p <= ALPHA)
            assert (verdict_of(ratio, 4, ALPHA, 0.02) in ("faster", "slower")) == excluded


def test_the_more_features_the_wider_every_interval() -> None:
    pair = ([1.0, 1.1, 0.9, 1.0], [0.9, 1.0, 0.85, 0.93])
    noise = ([1.0, 1.1, 0.9, 1.0], [1.1, 1.0, 0.95, 0.97])
    (alone,) = corrected_ratios([pair], ALPHA)
    among = corrected_ratios([noise, pair, noise], ALPHA)[1]
    assert alone is not None and among is not None
    assert alone.high is not None and among.high is not None and among.high > alone.high
    spent = ALPHA * (1 - RESERVE)
    assert alone.level == pytest.approx(1 - spent) and among.level == pytest.approx(1 - spent / 3)


def test_a_feature_that_did_not_run_costs_the_others_nothing() -> None:
    pair = ([1.0, 1.1, 0.9, 1.0], [0.9, 1.0, 0.85, 0.93])
    missing, found = corrected_ratios([None, pair], ALPHA)
    assert missing is None and found == corrected_ratios([pair], ALPHA)[0]


@pytest.mark.parametrize(
    ("low", "high", "adjusted_p", "verdict"),
    [
        (0.8, 0.9, 0.01, "faster"),
        (1.1, 1.2, 0.01, "slower"),
        (0.8, 0.9, 0.06, "undecided"),
        (0.99, 1.01, 0.5, "no_difference"),
        (0.9, 1.01, 0.5, "undecided"),
        (0.99, 1.1, 0.5, "undecided"),
        (0.992, 0.998, 0.001, "faster"),
    ],
)
def test_a_verdict_is_what_the_interval_supports(
    low: float, high: float, adjusted_p: float, verdict: str
) -> None:
    ratio = RatioInterval((low * high) ** 0.5, low, high, 0.95, adjusted_p, adjusted_p)
    assert verdict_of(ratio, 4, ALPHA, 0.02) == verdict
    assert verdict_of(ratio, 3, ALPHA, 0.02) == "undecided"


def test_one_pair_decides_nothing() -> None:
    (ratio,) = corrected_ratios([([1.0], [0.1])], ALPHA)
    assert ratio is not None and ratio.ratio == pytest.approx(0.1) and ratio.low is None
    assert verdict_of(ratio, 1, ALPHA, 0.02) == "undecided"


def test_values_that_are_no_times_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        paired_ratio([1.0, 0.0], [1.0, 1.0], 0.95)
    with pytest.raises(ValueError, match="no pairs"):
        paired_ratio([], [], 0.95)
    with pytest.raises(ValueError, match="no pairs"):
        paired_difference([1.0, 2.0], [1.0], 0.95)
