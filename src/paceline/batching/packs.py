"""Groups of samples into packed rows under a strict token budget, each prompt as seldom as possible."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.batching.cost import CostModel
from paceline.batching.micro_batches import OverBudgetError, Overlong, plan_micro_batches
from paceline.batching.prefixes import header_length


@dataclass(frozen=True, slots=True)
class GroupPart:
    """Some responses of one group (`group` and `responses` are indices); they share one copy of its prompt."""

    group: int
    responses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows of group parts, the longest first. `num_overlong` counts samples that exceed the budget alone."""

    rows: tuple[tuple[GroupPart, ...], ...]
    num_overlong: int


def plan_packed_rows(
    prompts: Sequence[Sequence[int]],
    response_lengths: Sequence[Sequence[int]],
    budget: int,
    *,
    share_prefixes: bool,
    overlong: Overlong = "refuse",
    cost: CostModel | None = None,
) -> PackedRows:
    """Rows of at most `budget` laid-out tokens.

    With sharing, a group counts its prompt once and the prefix common to all prompts counts once per row; a group
    that does not fit is cut into parts, each with its own copy of the prompt. Without, every sample counts in full.

    Raises:
        OverBudgetError: `overlong` is "refuse" and a sample with its prompt is longer than the budget.
    """
    header = header_length(prompts) if share_prefixes else 0
    parts: list[GroupPart] = []
    sizes: list[int] = []
    for group, (prompt, lengths) in enumerate(zip(prompts, response_lengths, strict=True)):
        longest = len(prompt) + max(lengths)
        if longest > budget and overlong == "refuse":
            raise OverBudgetError(longest, budget)
        own = len(prompt) - header
        for responses in _cut_group(lengths, budget - len(prompt), share_prefixes):
            parts.append(GroupPart(group, responses))
            sizes.append(own + sum(lengths[r] for r in responses))
    # an overlong part is longer than this capacity as well: header + own = its prompt
    plan = plan_micro_batches(sizes, max(1, budget - header), overlong="own_micro_batch", cost=cost)
    return PackedRows(
        tuple(tuple(parts[index] for index in row) for row in plan.micro_batches), plan.num_overlong
    )


def _cut_group(lengths: Sequence[int], room: int, share: bool) -> list[tuple[int, ...]]:
    """Responses of one group that can share a row which has `room` tokens left beside the prompt."""
    if not share:
        return [(index,) for index in range(len(lengths))]
    if sum(lengths) <= room:
        return [tuple(range(len(lengths)))]
    return list(plan_micro_batches(lengths, max(1, room), overlong="own_micro_batch").micro_batches)
