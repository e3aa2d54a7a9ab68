"""The padded layout: micro-batches of rows that are all as wide as one width, under a strict budget of slots.

A width is made in this order: the longest sample, then the bucket or the forced length, then the multiple that parallel
ranks or FP8 kernels need. Alignment last, because a maximum over lengths that were aligned first would depend on who
aligned them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.batching.micro_batches import OverBudgetError, Overlong

PadTo = Literal["micro_batch", "bucket", "mini_batch"]

BUCKETS_PER_DOUBLING = 4
"""Default number of bucket widths between a power of two and the next: at most a quarter of a row is padding."""


@dataclass(frozen=True, slots=True)
class PaddedMicroBatch:
    """Samples (indices into the lengths) padded to `width` tokens, laid out in `num_rows` rows: those that no sample
    takes are padding from end to end."""

    rows: tuple[int, ...]
    width: int
    num_rows: int

    @property
    def num_slots(self) -> int:
        """Computed positions, padding included."""
        return self.num_rows * self.width


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

    @property
    def shapes(self) -> frozenset[tuple[int, int]]:
        """The distinct (rows, width): kernels that plan or compile per shape do so this many times."""
        return frozenset((m.num_rows, m.width) for m in self.micro_batches)


def bucket_width(length: int, buckets_per_doubling: int = BUCKETS_PER_DOUBLING) -> int:
    """The least bucket that holds `length` tokens; 0 of 0.

    Between a power of two P and 2P the buckets are P + i * P / n, with n a power of two (below P = n: every length). At
    most 1/n of a row is padding, and lengths up to L need n * log2(L) widths at most.

    Raises:
        ValueError: `length` is negative or `buckets_per_doubling` is not a power of two.
    """
    if length < 0 or buckets_per_doubling < 1 or buckets_per_doubling & (buckets_per_doubling - 1):
        raise ValueError(
            f"no buckets for {length} tokens with {buckets_per_doubling} (a power of two) per doubling"
        )
    if length == 0:
        return 0
    power = 1 << (length.bit_length() - 1)
    step = max(1, power // buckets_per_doubling)
    return round_up(length, step)


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
    return round_up(longest if forced_width is None else forced_width, align)


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def row_total(num_tokens: int, budget: int, *, multiple: int = 1, align: int = 1) -> int:
    """Tokens a packed row is filled up to: a multiple of `multiple`, so that few lengths occur, then of `align`.

    Never above a `budget` that the row itself keeps: the budget is the last of the lengths.

    Raises:
        ValueError: `multiple` or `align` is below one.
    """
    if multiple < 1 or align < 1:
        raise ValueError(f"a row cannot be a multiple of {min(multiple, align)} tokens")
    needed = round_up(num_tokens, align)
    wanted = round_up(round_up(num_tokens, multiple), align)
    last = budget // align * align
    return wanted if wanted <= budget else max(needed, last if needed <= budget else wanted)


def plan_padded(
    lengths: Sequence[int],
    budget: int,
    *,
    pad_to: PadTo = "micro_batch",
    align: int = 1,
    forced_width: int | None = None,
    forced_rows: int | None = None,
    longest: int | None = None,
    buckets_per_doubling: int = BUCKETS_PER_DOUBLING,
    overlong: Overlong = "refuse",
) -> PaddedPlan:
    """Partitions samples so that rows x width is at most `budget` in every micro-batch.

    The width is that of the micro-batch's longest sample; or the next bucket (`bucket_width`), the budget being the
    last one; or the mini-batch's longest, so that one shape serves all; or `forced_width`. `longest` is the
    mini-batch's maximum over all data ranks, of which `lengths` are one rank's. With `forced_rows`, every micro-batch
    has so many rows, or as many as the budget holds at its width: the number of rows then follows from the width. As
    few micro-batches as possible, and among these the fewest slots. An empty mini-batch, or rank, gives an empty plan.
    A row wider than the budget is refused or gets a micro-batch of its own.

    Raises:
        OverBudgetError: `overlong` is "refuse" and one padded row exceeds the budget.
        ValueError: `forced_width` or `longest` is less than the longest sample, or a size is below one.
    """
    if budget < 1 or (lengths and min(lengths) < 1) or (forced_rows is not None and forced_rows < 1):
        raise ValueError(f"lengths, rows and the budget ({budget}) must be at least one")
    if longest is not None and longest < max(lengths, default=0):
        raise ValueError(
            f"the mini-batch's longest sample, {longest} tokens, is shorter than one of this rank"
        )
    whole = [*lengths, longest] if longest else lengths
    common = padded_width(whole, align=align, forced_width=forced_width)
    if not lengths:
        return PaddedPlan((), 0, 0)
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if forced_width is not None or pad_to == "mini_batch":
        widths = [common] * len(order)
    else:
        per_doubling = buckets_per_doubling if pad_to == "bucket" else None
        widths = [_own_width(lengths[index], budget, align, per_doubling) for index in order]
    num_overlong = sum(width > budget for width in widths)
    if num_overlong and overlong == "refuse":
        raise OverBudgetError(widths[0], budget, padded_from=max(whole))
    micro_batches = tuple(
        PaddedMicroBatch(
            tuple(sorted(order[start:end])),
            widths[start],
            end - start if forced_rows is None else min(forced_rows, _room(budget, widths[start])),
        )
        for start, end in _cut(widths, budget, forced_rows)
    )
    return PaddedPlan(micro_batches, num_overlong, sum(lengths))


def _own_width(length: int, budget: int, align: int, buckets_per_doubling: int | None) -> int:
    """Width of a row that is the longest of its micro-batch. A bucket never pushes a row that fits over the budget."""
    needed = padded_width([length], align=align)
    if buckets_per_doubling is None:
        return needed
    width = round_up(bucket_width(length, buckets_per_doubling), align)
    return width if width <= budget else max(needed, budget // align * align)


def _room(budget: int, width: int) -> int:
    """Rows of `width` that the budget holds, one at least."""
    return max(1, budget // width)


def _cut(widths: Sequence[int], budget: int, forced_rows: int | None) -> list[tuple[int, int]]:
    """Cuts descending `widths` into runs of (start, end), the first of each being its width.

    Some best partition consists of such runs: exchanging two rows so that the wider one joins the wider run raises no
    width. `best[i]` is the least (number of runs, slots) for the rows from i on, `ends[i]` where their first run ends.
    """
    num_rows = len(widths)
    best = [(0, 0)] * (num_rows + 1)
    ends = [num_rows] * num_rows
    for start in reversed(range(num_rows)):
        most = _room(budget, widths[start])
        if forced_rows is not None:
            most = min(most, forced_rows)
        choices = []
        for end in range(start + 1, min(num_rows, start + most) + 1):
            runs, slots = best[end]
            laid_out = end - start if forced_rows is None else most
            choices.append((runs + 1, slots + laid_out * widths[start], -end))
        runs, slots, negative_end = min(choices)
        best[start], ends[start] = (runs, slots), -negative_end
    runs_found = []
    start = 0
    while start < num_rows:
        runs_found.append((start, ends[start]))
        start = ends[start]
    return runs_found
