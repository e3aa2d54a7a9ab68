"""Samples to micro-batches: the plan of a layout, applied to what the trainer holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.batching.cost import CostModel
from paceline.batching.micro_batches import OverBudgetError
from paceline.batching.packs import laid_out_tokens, plan_packed_rows
from paceline.batching.padding import BUCKETS_PER_DOUBLING, padded_width, plan_padded, row_total
from paceline.batching.prefixes import PackItem, PackPlan, build_pack, pad_pack
from paceline.config.schema import BatchSection
from paceline.engine.samples import TokenPair, group_by_prompt, num_tokens
from paceline.model.inputs import ModelInputs, packed_inputs, padded_inputs
from paceline.telemetry.flops import ModelShape


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """A micro-batch to be: `order` are indices into the planned samples, laid out in `num_rows` rows of `width` tokens.

    A packed micro-batch is one row. Kernels that plan or compile for a shape do so for every new (rows, width).
    """

    order: tuple[int, ...]
    num_rows: int
    width: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples computed together; `order` are indices into the planned samples, as their response tokens follow.

    `num_slots` counts computed positions, padding included, and `num_padding` those that no token of a sample takes;
    `segments` are (length, tokens before it) of every computed piece without padding, from which attention FLOPs
    follow; `num_response_tokens` pass the log-prob head.
    """

    order: tuple[int, ...]
    num_slots: int
    num_padding: int
    segments: tuple[tuple[int, int], ...]
    num_response_tokens: int
    inputs: ModelInputs


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a pass will compute, largest micro-batch first. `num_tokens` are the tokens of the samples as they are."""

    rows: tuple[PlannedRow, ...]
    num_tokens: int
    num_overlong: int


def cost_model(shape: ModelShape) -> CostModel:
    """FLOPs of a sequence by its length, for balancing."""
    return CostModel.from_sizes(shape.body_parameters, shape.num_layers, shape.num_heads, shape.head_dim)


def check_budget(samples: Sequence[TokenPair], settings: BatchSection, budget: int, num_sharing: int) -> int:
    """Refuses a sample that no plan can hold on every rank alike, before any of them waits for the others; returns the
    longest sample's tokens.

    Raises:
        OverBudgetError: a sample is longer than `budget` x `num_sharing` and `batch.overlong` is "refuse".
        ValueError: a sample is longer than `batch.pad_length`.
    """
    longest = max(map(num_tokens, samples), default=0)
    width = longest
    if settings.layout == "padded":
        width = padded_width([longest], align=num_sharing, forced_width=settings.pad_length)
    if settings.overlong == "refuse" and width > budget * num_sharing:
        raise OverBudgetError(longest, budget, num_sharing)
    return longest


def plan_batch(
    samples: Sequence[TokenPair],
    settings: BatchSection,
    token_budget: int,
    cost: CostModel,
    num_sharing: int = 1,
    longest: int | None = None,
) -> BatchPlan:
    """Plans one pass over `samples` under a strict `token_budget` per micro-batch and rank.

    `num_sharing` ranks share every row (sequence parallel): a row may hold that many times the budget, and its width
    is a multiple of them. `longest` is the longest sample of the mini-batch over all data ranks (default: of these).

    Raises:
        OverBudgetError: a sample is longer than the budget and `batch.overlong` is "refuse".
        ValueError: a sample is longer than `batch.pad_length`.
    """
    if not samples:
        return BatchPlan((), 0, 0)
    budget = token_budget * num_sharing
    if settings.layout == "padded":
        return _plan_padded(samples, settings, budget, num_sharing, longest)
    return _plan_packed(samples, settings, budget, num_sharing, cost)


def _plan_padded(
    samples: Sequence[TokenPair], settings: BatchSection, budget: int, num_sharing: int, longest: int | None
) -> BatchPlan:
    padded = plan_padded(
        [num_tokens(sample) for sample in samples],
        budget,
        pad_to=settings.pad_to,
        align=num_sharing,
        forced_width=settings.pad_length,
        forced_rows=settings.pad_rows,
        longest=longest,
        buckets_per_doubling=settings.buckets_per_doubling or BUCKETS_PER_DOUBLING,
        overlong=settings.overlong,
    )
    rows = tuple(PlannedRow(m.rows, m.num_rows, m.width) for m in padded.micro_batches)
    return BatchPlan(rows, padded.num_tokens, padded.num_overlong)


def _plan_packed(
    samples: Sequence[TokenPair], settings: BatchSection, budget: int, num_sharing: int, cost: CostModel
) -> BatchPlan:
    groups = group_by_prompt(samples)
    prompts = [samples[group[0]].prompt_ids for group in groups]
    lengths = [[len(samples[index].response_ids) for index in group] for group in groups]
    packed = plan_packed_rows(
        prompts,
        lengths,
        budget,
        share_prefixes=settings.shares_prefixes,
        overlong=settings.overlong,
        cost=cost,
    )
    rows = []
    for row in packed.rows:
        laid_out = laid_out_tokens(row, prompts, lengths, settings.shares_prefixes)
        width = row_total(laid_out, budget, multiple=settings.pack_multiple, align=num_sharing)
        order = tuple(groups[part.group][response] for part in row for response in part.responses)
        rows.append(PlannedRow(order, 1, width))
    return BatchPlan(tuple(rows), packed.num_tokens, packed.num_overlong)


def build_micro_batch(
    samples: Sequence[TokenPair], row: PlannedRow, settings: BatchSection, device: torch.device
) -> MicroBatch:
    """Tensors of one planned micro-batch, made when its turn comes so that only one is held at a time."""
    if settings.layout == "padded":
        pairs = [(samples[index].prompt_ids, samples[index].response_ids) for index in row.order]
        lengths = [len(prompt) + len(response) for prompt, response in pairs]
        return MicroBatch(
            order=row.order,
            num_slots=row.num_rows * row.width,
            num_padding=row.num_rows * row.width - sum(lengths),
            segments=tuple((length, 0) for length in lengths),
            num_response_tokens=sum(len(response) for _, response in pairs),
            inputs=padded_inputs(pairs, row.width, device, row.num_rows),
        )
    members = [samples[index] for index in row.order]
    groups = group_by_prompt(members)
    items = [
        PackItem(members[group[0]].prompt_ids, tuple(members[member].response_ids for member in group))
        for group in groups
    ]
    pack = build_pack(items, settings.shares_prefixes)
    return MicroBatch(
        order=tuple(row.order[member] for group in groups for member in group),
        num_slots=row.width,
        num_padding=row.width - len(pack.token_ids),
        segments=tuple((segment.length, int(pack.position_ids[segment.start])) for segment in pack.segments),
        num_response_tokens=len(pack.targets),
        inputs=packed_inputs(pack_to_width(pack, row.width, settings), device, row.width),
    )


def pack_to_width(pack: PackPlan, width: int, settings: BatchSection) -> PackPlan:
    """The row with its padding as part of the attention plan where rows are filled up to few lengths: the plan's own
    shapes then repeat too. The few tokens up to a multiple of the sequence-parallel ranks stay behind the plan's back.
    """
    return pad_pack(pack, width) if settings.pack_multiple > 1 else pack


def empty_inputs(settings: BatchSection, device: torch.device, num_sharing: int) -> ModelInputs:
    """The least that runs through a model: one prompt token and one response token, in the layout of the others.

    A rank that has no micro-batch left computes this while others compute theirs, so that all make the same collective
    calls; nothing of it is counted.
    """
    width = padded_width([2], align=num_sharing)
    if settings.layout == "padded":
        return padded_inputs([((0,), (0,))], width, device)
    return packed_inputs(build_pack([PackItem((0,), ((0,),))], share_prefixes=False), device, width)
