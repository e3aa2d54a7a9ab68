"""The over-long penalty, and which groups have a signal."""

import pytest

from paceline.algorithms.reward_shaping import has_signal, overlong_penalty


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (0, 0.0),
        (79, 0.0),
        (80, 0.0),
        (81, -0.05),
        (90, -0.5),
        (99, -0.95),
        (100, -1.0),
        (101, -1.0),
        (500, -1.0),
    ],
)
def test_the_penalty_falls_linearly_over_the_cache(num_tokens: int, expected: float) -> None:
    assert overlong_penalty(num_tokens, 100, 20) == pytest.approx(expected)


@pytest.mark.parametrize("num_tokens", [0, 99, 100, 101])
def test_a_cache_of_zero_switches_the_penalty_off(num_tokens: int) -> None:
    assert overlong_penalty(num_tokens, 100, 0) == 0.0


def test_a_cache_as_long_as_the_response_penalises_every_token() -> None:
    assert overlong_penalty(25, 100, 100) == -0.25


@pytest.mark.parametrize("cache", [-1, 101])
def test_a_cache_that_does_not_fit_is_refused(cache: int) -> None:
    with pytest.raises(ValueError, match="max_new_tokens = 100"):
        overlong_penalty(50, 100, cache)


@pytest.mark.parametrize(
    "scores", [[], [None, None], [1.0], [1.0, None], [1.0, 1.0], [0.0, None, 0.0], [0.5] * 8]
)
def test_a_group_that_cannot_tell_its_members_apart_has_no_signal(scores: list[float | None]) -> None:
    assert not has_signal(scores)


@pytest.mark.parametrize("scores", [[1.0, 0.0], [None, 1.0, 0.0], [1.0, None, 1.0, 0.5], [0.0] * 7 + [1.0]])
def test_a_group_with_two_different_verdicts_has_a_signal(scores: list[float | None]) -> None:
    assert has_signal(scores)


def test_a_missing_verdict_is_not_a_different_verdict() -> None:
    assert not has_signal([0.0, None]) and not has_signal([None, 0.0])
