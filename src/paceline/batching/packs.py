"""Groups of samples into packed rows under a strict token budget, each prompt as seldom as possible."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.batching.bins import best_fit
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
    """Rows of group parts, the costliest first; a row has at most one part of a group when prefixes are shared.

    `num_laid_out` are the tokens `build_pack` lays out for all rows, `num_tokens` those of every prompt + response by
    itself. `num_overlong` counts samples that exceed the budget alone; each has a row of its own.
    """

    rows: tuple[tuple[GroupPart, ...], ...]
    num_laid_out: int
    num_tokens: int
    num_overlong: int

    @property
    def effective_share(self) -> float:
        """Tokens of the samples per token laid out, above 1 where sharing saves work; 1.0 when there are none."""
        return self.num_tokens / self.num_laid_out if self.num_laid_out else 1.0


def plan_packed_rows(
    prompts: Sequence[Sequence[int]],
    response_lengths: Sequence[Sequence[int]],
    budget: int,
    *,
    share_prefixes: bool,
    overlong: Overlong = "refuse",
    cost: CostModel | None = None,
) -> PackedRows:
    """Rows of at most `budget` laid-out tokens; every response of every group is in exactly one of them.

    With sharing, a group counts its prompt once and the prefix common to all prompts counts once per row. A group that
    fits a row is never cut; one that does not is cut into as few parts as can be found, each with its own copy of the
    prompt. Without sharing, every sample counts in full and stands alone. Deterministic.

    Raises:
        OverBudgetError: `overlong` is "refuse" and a sample with its prompt is longer than the budget.
        ValueError: a prompt, a response or the budget is below one token, or a group has no responses.
    """
    _check(prompts, response_lengths, budget)
    model = cost or CostModel()
    header = header_length(prompts) if share_prefixes else 0
    parts: list[GroupPart] = []
    sizes: list[int] = []
    costs: list[float] = []
    for group, (prompt, lengths) in enumerate(zip(prompts, response_lengths, strict=True)):
        longest = len(prompt) + max(lengths)
        if longest > budget and overlong == "refuse":
            raise OverBudgetError(longest, budget)
        for responses in _cut_group(lengths, budget - len(prompt), share_prefixes):
            chosen = [lengths[index] for index in responses]
            parts.append(GroupPart(group, responses))
            sizes.append(len(prompt) - header + sum(chosen))
            own = model.cost(len(prompt) - header, header)
            costs.append(own + sum(model.cost(length, len(prompt)) for length in chosen))
    # header + size is the length of a part alone in its row, so what exceeds this room exceeds the budget too
    plan = plan_micro_batches(sizes, max(1, budget - header), overlong="own_micro_batch", item_costs=costs)
    rows = tuple(tuple(parts[index] for index in row) for row in plan.micro_batches)
    return PackedRows(
        rows,
        num_laid_out=sum(laid_out_tokens(row, prompts, response_lengths, share_prefixes) for row in rows),
        num_tokens=sum(
            len(prompt) * len(lengths) + sum(lengths)
            for prompt, lengths in zip(prompts, response_lengths, strict=True)
        ),
        num_overlong=sum(
            len(prompt) + length > budget
            for prompt, lengths in zip(prompts, response_lengths, strict=True)
            for length in lengths
        ),
    )


def laid_out_tokens(
    row: Sequence[GroupPart],
    prompts: Sequence[Sequence[int]],
    response_lengths: Sequence[Sequence[int]],
    share_prefixes: bool,
) -> int:
    """Tokens `build_pack` lays out for one row with one item per part."""
    num_response = sum(response_lengths[part.group][index] for part in row for index in part.responses)
    if not share_prefixes:
        return num_response + sum(len(prompts[part.group]) * len(part.responses) for part in row)
    header = header_length([prompts[part.group] for part in row])
    return num_response + sum(len(prompts[part.group]) for part in row) - header * max(0, len(row) - 1)


def _check(prompts: Sequence[Sequence[int]], response_lengths: Sequence[Sequence[int]], budget: int) -> None:
    if budget < 1:
        raise ValueError(f"the token budget ({budget}) is at least 1")
    if len(prompts) != len(response_lengths):
        raise ValueError(
            f"{len(prompts)} prompts and responses of {len(response_lengths)} groups do not match"
        )
    for group, (prompt, lengths) in enumerate(zip(prompts, response_lengths, strict=True)):
        if not prompt or not lengths or min(lengths) < 1:
            raise ValueError(f"group {group} needs a prompt and responses of at least one token each")


def _cut_group(lengths: Sequence[int], room: int, share: bool) -> list[tuple[int, ...]]:
    """Responses of one group that can share a row which has `room` tokens left beside the prompt.

    Full parts and one remainder, rather than even ones: the remainder leaves room for other groups in its row. No two
    parts of best fit would fit one row together, so a row never lays a prompt out twice.
    """
    if not share:
        return [(index,) for index in range(len(lengths))]
    if sum(lengths) <= room:
        return [tuple(range(len(lengths)))]
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    alone = [(index,) for index in order if lengths[index] > room]
    bins = best_fit(order[len(alone) :], lengths, max(1, room))
    return [*alone, *(tuple(sorted(members)) for members in bins)]
