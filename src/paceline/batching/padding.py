"""The padded layout: micro-batches of rows that are all as wide as one width, under a strict budget of slots."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.batching.micro_batches import OverBudgetError, Overlong

PadTo = Literal["micro_batch", "mini_batch"]


@dataclass(frozen=True, slots=True)
class PaddedMicroBatch:
    """Rows (indices into the lengths) padded to `width` tokens."""

    rows: tuple[int, ...]
    width: int

    @property
    def num_slots(self) -> int:
        """Computed positions, padding included."""
        return len(self.rows) * self.width


@dataclass(frozen=True, slots=True)
class PaddedPlan:
    """Micro-batches, the widest first, and how many rows exceed the budget alone."""

    micro_batches: tuple[PaddedMicroBatch, ...]
    num_overlong: int


def plan_padded(
    lengths: Sequence[int],
    budget: int,
    *,
    pad_to: PadTo = "micro_batch",
    align: int = 1,
    forced_width: int | None = None,
    overlong: Overlong = "refuse",
) -> PaddedPlan:
    """Partitions samples so that rows x width is at most `budget` in every micro-batch.

    The width is the longest sample of the micro-batch, or of the whole mini-batch so that shapes repeat, or
    `forced_width`; the raw maximum is taken first and rounded up to a multiple of `align` after. Samples of like length
    come together. An empty mini-batch gives an empty plan.

    Raises:
        OverBudgetError: `overlong` is "refuse" and one padded row exceeds the budget.
        ValueError: `forced_width` is less than the longest sample.
    """
    if not lengths:
        return PaddedPlan((), 0)
    if forced_width is not None and forced_width < max(lengths):
        raise ValueError(
            f"forced width {forced_width} is less than the longest sample, {max(lengths)} tokens"
        )
    common = forced_width or (max(lengths) if pad_to == "mini_batch" else None)
    micro_batches: list[PaddedMicroBatch] = []
    num_overlong = 0
    rows: list[int] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        own = -(-(common or lengths[index]) // align) * align
        if rows and (len(rows) + 1) * width > budget:
            micro_batches.append(PaddedMicroBatch(tuple(rows), width))
            rows = []
        if not rows:
            width = own
            if width > budget:
                if overlong == "refuse":
                    raise OverBudgetError(width, budget)
                num_overlong += 1
        rows.append(index)
    micro_batches.append(PaddedMicroBatch(tuple(rows), width))
    return PaddedPlan(tuple(micro_batches), num_overlong)
