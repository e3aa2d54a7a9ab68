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
    """Micro-batches, the widest first; how many rows exceed the budget alone; and the sum of all lengths."""

    micro_batches: tuple[PaddedMicroBatch, ...]
    num_overlong: int
    num_tokens: int

    @property
    def num_slots(self) -> int:
        """Computed positions of all micro-batches, padding included."""
        return sum(micro_batch.num_slots for micro_batch in self.micro_batches)

    @property
    def effective_share(self) -> float:
        """Tokens over slots, at most 1; 1.0 when there are none."""
        return self.num_tokens / self.num_slots if self.num_slots else 1.0


def padded_width(lengths: Sequence[int], *, align: int = 1, forced_width: int | None = None) -> int:
    """Width that holds all `lengths`: their maximum (or `forced_width`), then rounded up to `align`; 0 of none.

    Raises:
        ValueError: `forced_width` is less than the longest sample, or `align` is below one.
    """
    longest = max(lengths, default=0)
    if align < 1:
        raise ValueError(f"widths cannot be multiples of {align}")
    if forced_width is not None and forced_width < longest:
        raise ValueError(
            f"forced width {forced_width} is less than the longest sample, {longest} tokens; raise it to {longest}"
        )
    return -(-(longest if forced_width is None else forced_width) // align) * align


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

    The width is that of the micro-batch's longest sample, or of the whole mini-batch's so that shapes repeat, or
    `forced_width`, as `padded_width` has it. As few micro-batches as possible, and among these the fewest slots. An
    empty mini-batch gives an empty plan. A row wider than the budget is refused or gets a micro-batch of its own.

    Raises:
        OverBudgetError: `overlong` is "refuse" and one padded row exceeds the budget.
        ValueError: `forced_width` is less than the longest sample, or a length, the budget or `align` is below one.
    """
    if budget < 1 or (lengths and min(lengths) < 1):
        raise ValueError(f"lengths and the budget ({budget}) must be at least one token")
    common = padded_width(lengths, align=align, forced_width=forced_width)
    if not lengths:
        return PaddedPlan((), 0, 0)
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if forced_width is not None or pad_to == "mini_batch":
        widths = [common] * len(order)
    else:
        widths = [padded_width([lengths[index]], align=align) for index in order]
    num_overlong = sum(width > budget for width in widths)
    if num_overlong and overlong == "refuse":
        raise OverBudgetError(widths[0], budget, padded_from=lengths[order[0]])
    micro_batches = tuple(
        PaddedMicroBatch(tuple(sorted(order[start:end])), widths[start])
        for start, end in _cut(widths, budget)
    )
    return PaddedPlan(micro_batches, num_overlong, sum(lengths))


def _cut(widths: Sequence[int], budget: int) -> list[tuple[int, int]]:
    """Cuts descending `widths` into runs of (start, end), the first of each being its width.

    Some best partition consists of such runs: exchanging two rows so that the wider one joins the wider run raises no
    width. `best[i]` is the least (number of runs, slots) for the rows from i on, `ends[i]` where their first run ends.
    """
    num_rows = len(widths)
    best = [(0, 0)] * (num_rows + 1)
    ends = [num_rows] * num_rows
    for start in reversed(range(num_rows)):
        most = max(1, budget // widths[start])
        choices = []
        for end in range(start + 1, min(num_rows, start + most) + 1):
            runs, slots = best[end]
            choices.append((runs + 1, slots + (end - start) * widths[start], -end))
        runs, slots, negative_end = min(choices)
        best[start], ends[start] = (runs, slots), -negative_end
    runs_found = []
    start = 0
    while start < num_rows:
        runs_found.append((start, ends[start]))
        start = ends[start]
    return runs_found
