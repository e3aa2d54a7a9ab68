"""Rewards to advantages, one small class per scheme. Free of torch: a batch has a few thousand scores.

Every scheme is an affine map of a score, (score - center) * scale, that it finds from the scores of the group or of
the batch. What all have in common is here once: a sample without a verdict is in no statistic and gets no advantage;
equal scores give exactly 0; nothing is divided by a standard deviation below the floor.
"""

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

AllReduce = Callable[[tuple[float, ...]], tuple[float, ...]]
"""Element-wise sum over all ranks of equally long tuples; every rank must call it equally often."""


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages in the ragged shape of the rewards: one row per group, one entry per sample.

    `values` is 0.0 where there is no verdict and `valid` is False there: such a sample belongs in no loss and no
    denominator. Counts are of this rank's groups, by their verdicts: none (`num_dropped_groups`), one
    (`num_singleton_groups`), or more but every advantage 0 (`num_zero_signal_groups`).
    """

    values: tuple[tuple[float, ...], ...]
    valid: tuple[tuple[bool, ...], ...]
    num_zero_signal_groups: int
    num_without_verdict: int
    num_singleton_groups: int
    num_dropped_groups: int


@dataclass(frozen=True, slots=True)
class Affine:
    """score -> (score - center) * scale."""

    center: float
    scale: float


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and population standard deviation of all scores of the batch, over all ranks."""

    mean: float
    std: float


class Scheme(ABC):
    """One credit scheme. `uses_batch` asks for the batch's moments, which cost two reductions over the ranks."""

    uses_batch = False

    def __init__(self, std_floor: float) -> None:
        self.std_floor = std_floor

    @abstractmethod
    def affine(self, scores: Sequence[float], batch: Moments | None) -> Affine:
        """The map for a group's scores (at least one, no None); `batch` is there exactly with `uses_batch`."""


class GroupNorm(Scheme):
    """(r - mean) / std of the group (GRPO, Shao et al. 2024).

    Contract: sample standard deviation (k - 1 in the denominator), no epsilon; below `std_floor` advantage 0.
    """

    def affine(self, scores: Sequence[float], batch: Moments | None) -> Affine:
        """Mean and sample standard deviation of the group."""
        mean = _mean(scores)
        if len(scores) < 2:
            return Affine(mean, 0.0)
        std = math.sqrt(_squares(scores, mean) / (len(scores) - 1))
        return Affine(mean, 0.0 if std < self.std_floor else 1.0 / std)


class GroupCenter(Scheme):
    """r - mean of the group (Dr. GRPO, Liu et al. 2025). Nothing divides, so `std_floor` plays no part."""

    def affine(self, scores: Sequence[float], batch: Moments | None) -> Affine:
        """Mean of the group."""
        return Affine(_mean(scores), 1.0)


class LeaveOneOut(Scheme):
    """r - mean of the other members (RLOO, Ahmadian et al. 2024) = (r - mean) * k / (k - 1).

    Contract: never divided by a standard deviation, so `std_floor` plays no part; a group of one gets 0.
    """

    def affine(self, scores: Sequence[float], batch: Moments | None) -> Affine:
        """Mean of the group, scaled to that of the others."""
        k = len(scores)
        return Affine(_mean(scores), k / (k - 1) if k > 1 else 0.0)


class BatchWhiten(Scheme):
    """(r - mean) / std of the whole batch over all ranks (REINFORCE++, Hu et al. 2025): one affine map for all.

    Contract: population standard deviation of all scores that there are, no epsilon; below `std_floor` advantage 0.
    """

    uses_batch = True

    def affine(self, scores: Sequence[float], batch: Moments | None) -> Affine:
        """Mean and standard deviation of the batch, whatever the group."""
        assert batch is not None
        return Affine(batch.mean, 0.0 if batch.std < self.std_floor else 1.0 / batch.std)


SCHEMES: dict[str, type[Scheme]] = {
    "group_norm": GroupNorm,
    "group_center": GroupCenter,
    "leave_one_out": LeaveOneOut,
    "batch_whiten": BatchWhiten,
}


def compute_advantages(
    scheme: str,
    rewards: Sequence[Sequence[float | None]],
    std_floor: float,
    all_reduce: AllReduce | None = None,
) -> Advantages:
    """Advantages of this rank's groups; a reward of None is a sample without a verdict.

    A group lies on one rank. `all_reduce` sums over ranks, and None means there is only this one; batch_whiten calls it
    twice on every rank whatever the shard holds, nothing included, and the other schemes never. Raises `ValueError` for
    an unknown scheme, a floor that is not positive, or a reward that is not finite.
    """
    if scheme not in SCHEMES:
        nearest = (difflib.get_close_matches(scheme, SCHEMES, 1, 0.0) or [""])[0]
        raise ValueError(f"there is no advantage scheme {scheme!r}; the nearest is {nearest}")
    if not std_floor > 0:
        raise ValueError(f"std_floor must be above 0, and {std_floor} is not")
    groups = [_verdicts(index, group) for index, group in enumerate(rewards)]
    chosen = SCHEMES[scheme](std_floor)
    batch = _batch_moments(groups, all_reduce or _alone) if chosen.uses_batch else None
    values = tuple(
        _group_values(group, chosen.affine(scores, batch)) if scores else (0.0,) * len(group)
        for group, scores in zip(rewards, groups, strict=True)
    )
    return Advantages(
        values=values,
        valid=tuple(tuple(reward is not None for reward in group) for group in rewards),
        num_zero_signal_groups=sum(
            len(scores) > 1 and not any(row) for scores, row in zip(groups, values, strict=True)
        ),
        num_without_verdict=sum(reward is None for group in rewards for reward in group),
        num_singleton_groups=sum(len(scores) == 1 for scores in groups),
        num_dropped_groups=sum(not scores for scores in groups),
    )


def _verdicts(index: int, group: Sequence[float | None]) -> list[float]:
    scores = [reward for reward in group if reward is not None]
    if not all(math.isfinite(score) for score in scores):
        raise ValueError(f"rewards of group {index} must be finite numbers or None: {list(group)}")
    return scores


def _group_values(group: Sequence[float | None], affine: Affine) -> tuple[float, ...]:
    # + 0.0 makes a negative zero a plain one
    return tuple(0.0 if r is None else (r - affine.center) * affine.scale + 0.0 for r in group)


def _mean(scores: Sequence[float]) -> float:
    # equal scores have exactly that mean, which a sum and a division can miss by a rounding
    low, high = min(scores), max(scores)
    return low if low == high else math.fsum(scores) / len(scores)


def _squares(scores: Sequence[float], mean: float) -> float:
    return math.fsum((score - mean) ** 2 for score in scores)


def _alone(values: tuple[float, ...]) -> tuple[float, ...]:
    return values


def _batch_moments(groups: Sequence[Sequence[float]], all_reduce: AllReduce) -> Moments:
    """Two passes, so that the deviations are taken from the global mean; every rank reduces twice, an empty one too."""
    scores = [score for group in groups for score in group]
    count, total = all_reduce((float(len(scores)), math.fsum(scores)))
    mean = total / count if count else 0.0
    (squares,) = all_reduce((_squares(scores, mean),))
    return Moments(mean, math.sqrt(squares / count) if count else 0.0)
