"""Credit schemes on the rewards of small groups, whole batches and shards of them."""

import math
import threading
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.algorithms.advantages import SCHEMES, Advantages, compute_advantages

FLOOR = 1e-3
GROUP_SCHEMES = ["group_norm", "group_center", "leave_one_out"]
Rewards = Sequence[Sequence[float | None]]


def of_group(scheme: str, *rewards: float | None) -> tuple[float, ...]:
    """Advantages of a batch of one group."""
    return compute_advantages(scheme, [rewards], FLOOR).values[0]


class Ranks:
    """As many threads as shards, which sum at a barrier; a rank that does not come breaks it for all."""

    def __init__(self, shards: Sequence[Rewards]) -> None:
        self._shards = shards
        self._barrier = threading.Barrier(len(shards))
        self._given: dict[int, tuple[float, ...]] = {}
        self.num_reductions = [0] * len(shards)

    def run(self, scheme: str) -> list[Advantages]:
        """Advantages of every rank."""
        found: dict[int, Advantages] = {}

        def work(rank: int) -> None:
            found[rank] = compute_advantages(
                scheme, self._shards[rank], FLOOR, lambda values: self._sum(rank, values)
            )

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(self._shards))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert len(found) == len(self._shards), "a rank waits or has failed"
        return [found[rank] for rank in range(len(self._shards))]

    def _sum(self, rank: int, values: tuple[float, ...]) -> tuple[float, ...]:
        self.num_reductions[rank] += 1
        self._given[rank] = values
        self._barrier.wait(timeout=10)
        total = tuple(math.fsum(column) for column in zip(*self._given.values(), strict=True))
        self._barrier.wait(timeout=10)
        return total


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("group_norm", (1.5, -0.5, -0.5, -0.5)),
        ("group_center", (0.75, -0.25, -0.25, -0.25)),
        ("leave_one_out", (1.0, -1 / 3, -1 / 3, -1 / 3)),
        ("batch_whiten", (1.7320508, -0.5773503, -0.5773503, -0.5773503)),
    ],
)
def test_one_right_of_four(scheme: str, expected: tuple[float, ...]) -> None:
    assert of_group(scheme, 1, 0, 0, 0) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("scheme", "right", "wrong"),
    [
        ("leave_one_out", 5 / 7, -3 / 7),
        ("group_norm", 1.2076147, -0.7245688),
        ("group_center", 0.625, -0.375),
    ],
)
def test_three_right_of_eight(scheme: str, right: float, wrong: float) -> None:
    expected = [right] * 3 + [wrong] * 5
    assert of_group(scheme, 1, 1, 1, 0, 0, 0, 0, 0) == pytest.approx(expected)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("reward", [1.0, 0.0, 0.1, 1 / 3, -2.7, 1e9])
@pytest.mark.parametrize("size", [2, 3, 7, 8])
def test_equal_rewards_give_exactly_zero(scheme: str, reward: float, size: int) -> None:
    advantages = compute_advantages(scheme, [[reward] * size] * 2, FLOOR)
    assert advantages.values == ((0.0,) * size,) * 2
    assert advantages.num_zero_signal_groups == 2


@pytest.mark.parametrize("scheme", ["group_norm", "batch_whiten"])
def test_below_the_floor_nothing_is_divided_and_it_is_counted(scheme: str) -> None:
    advantages = compute_advantages(scheme, [[0.5, 0.5 + 1e-5, 0.5]], FLOOR)
    assert advantages.values == ((0.0, 0.0, 0.0),) and advantages.num_zero_signal_groups == 1
    assert compute_advantages(scheme, [[0.5, 0.6, 0.5]], FLOOR).num_zero_signal_groups == 0


@pytest.mark.parametrize("scheme", ["group_center", "leave_one_out"])
def test_the_floor_plays_no_part_where_nothing_divides(scheme: str) -> None:
    values = compute_advantages(scheme, [[0.0, 1e-5]], FLOOR).values[0]
    assert values[1] == -values[0] and values[1] > 0.0


def test_leave_one_out_does_not_divide_by_the_spread_of_the_others() -> None:
    values = of_group("leave_one_out", *[0.35] * 7, 0.0)
    assert values[-1] == pytest.approx(-0.35)
    assert values[:-1] == pytest.approx([0.05] * 7)


@pytest.mark.parametrize("scheme", GROUP_SCHEMES)
def test_a_group_of_one_has_no_baseline_and_gets_zero(scheme: str) -> None:
    advantages = compute_advantages(scheme, [[1.0]], FLOOR)
    assert advantages.values == ((0.0,),) and advantages.valid == ((True,),)
    assert (advantages.num_singleton_groups, advantages.num_zero_signal_groups) == (1, 0)


def test_groups_of_one_are_whitened_over_the_batch() -> None:
    advantages = compute_advantages("batch_whiten", [[1.0], [0.0]], FLOOR)
    assert advantages.values == ((1.0,), (-1.0,)) and advantages.num_singleton_groups == 2


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        ("group_center", (1 / 3, 0.0, -2 / 3, 1 / 3)),
        ("leave_one_out", (0.5, 0.0, -1.0, 0.5)),
        ("group_norm", (0.5773503, 0.0, -1.1547005, 0.5773503)),
        ("batch_whiten", (0.7071068, 0.0, -1.4142136, 0.7071068)),
    ],
)
def test_a_member_without_a_verdict_does_not_move_its_siblings(
    scheme: str, expected: tuple[float, ...]
) -> None:
    advantages = compute_advantages(scheme, [[1, None, 0, 1]], FLOOR)
    assert advantages.values[0] == pytest.approx(expected)
    assert advantages.valid == ((True, False, True, True),)
    assert advantages.num_without_verdict == 1


@pytest.mark.parametrize("scheme", GROUP_SCHEMES)
def test_one_survivor_gets_zero_and_is_counted(scheme: str) -> None:
    advantages = compute_advantages(scheme, [[None, 1.0, None]], FLOOR)
    assert advantages.values == ((0.0, 0.0, 0.0),) and advantages.valid == ((False, True, False),)
    assert (advantages.num_singleton_groups, advantages.num_without_verdict) == (1, 2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_group_without_survivors_is_dropped_and_counted(scheme: str) -> None:
    alone = compute_advantages(scheme, [[1.0, 0.0]], FLOOR)
    advantages = compute_advantages(scheme, [[None, None], [1.0, 0.0], []], FLOOR)
    assert advantages.values == ((0.0, 0.0), alone.values[0], ())
    assert advantages.valid == ((False, False), (True, True), ())
    assert (advantages.num_dropped_groups, advantages.num_without_verdict) == (2, 2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_empty_batch_has_no_advantages(scheme: str) -> None:
    assert compute_advantages(scheme, [], FLOOR) == Advantages((), (), 0, 0, 0, 0)


def test_whitening_is_one_affine_map_for_all_shards_an_empty_one_included() -> None:
    ranks = Ranks([[[1.0, 2.0]], [[3.0, 4.0, 5.0]], []])
    first, second, third = ranks.run("batch_whiten")
    assert first.values[0] == pytest.approx((-1.4142136, -0.7071068))
    assert second.values[0] == pytest.approx((0.0, 0.7071068, 1.4142136))
    assert third.values == ()
    assert len(set(ranks.num_reductions)) == 1


@pytest.mark.parametrize("empty", [[], [[None, None]], [[]]])
def test_ranks_that_are_all_empty_make_the_same_calls_as_any_other(empty: Rewards) -> None:
    ranks = Ranks([empty, []])
    assert [advantages.valid for advantages in ranks.run("batch_whiten")] == [
        tuple((False,) * len(group) for group in empty),
        (),
    ]
    full = Ranks([[[1.0, 2.0]], [[3.0]]])
    full.run("batch_whiten")
    assert ranks.num_reductions == full.num_reductions


@pytest.mark.parametrize("scheme", GROUP_SCHEMES)
def test_schemes_of_one_group_reduce_nothing(scheme: str) -> None:
    ranks = Ranks([[[1.0, 0.0]], []])
    ranks.run(scheme)
    assert ranks.num_reductions == [0, 0]


scores = st.one_of(st.none(), st.floats(-10, 10), st.sampled_from([0.0, 1.0]))
batches = st.lists(st.lists(scores, max_size=6), max_size=6)


@pytest.mark.parametrize("scheme", SCHEMES)
@given(rewards=batches)
def test_advantages_keep_the_shape_are_finite_and_zero_without_a_verdict(
    scheme: str, rewards: Rewards
) -> None:
    advantages = compute_advantages(scheme, rewards, FLOOR)
    assert [len(row) for row in advantages.values] == [len(group) for group in rewards]
    for group, values, valid in zip(rewards, advantages.values, advantages.valid, strict=True):
        assert all(math.isfinite(value) for value in values)
        assert list(valid) == [reward is not None for reward in group]
        assert all(value == 0.0 for value, ok in zip(values, valid, strict=True) if not ok)
    if scheme == "batch_whiten":
        assert sum(map(sum, advantages.values)) == pytest.approx(0.0, abs=1e-6)
    else:
        assert [sum(values) for values in advantages.values] == pytest.approx([0.0] * len(rewards), abs=1e-6)


def test_an_unknown_scheme_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"group_norms.*nearest is group_norm"):
        compute_advantages("group_norms", [], FLOOR)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_finite_number_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="group 1 must be finite"):
        compute_advantages("group_norm", [[1.0], [0.0, reward]], FLOOR)


def test_a_floor_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="std_floor"):
        compute_advantages("group_norm", [], 0.0)
