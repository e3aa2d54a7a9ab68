"""Samples to micro-batches: the plan of a layout, applied to what the trainer holds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.batching.cost import CostModel
from paceline.batching.micro_batches import OverBudgetError
from paceline.batching.packs import plan_packed_rows
from paceline.batching.padding import padded_width, plan_padded
from paceline.batching.prefixes import PackItem, build_pack
from paceline.config.schema import BatchSection
from paceline.engine.samples import TokenPair, group_by_prompt, num_tokens
from paceline.model.inputs import ModelInputs, packed_inputs, padded_inputs
from paceline.telemetry.flops import ModelShape


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples computed together; `order` are indices into the planned samples, as their response tokens follow.

    `num_slots` counts computed positions, padding included; `segments` are (length, tokens before it) of every computed
    piece, from which attention FLOPs follow; `num_response_tokens` pass the log-prob head.
    """

    order: tuple[int, ...]
    num_slots: int
    segments: tuple[tuple[int, int], ...]
    num_response_tokens: int
    inputs: ModelInputs


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """What a pass will compute, largest micro-batch first.

    `num_tokens` are the tokens of the samples as they are, `rows` their micro-batches (indices into the samples, and
    the padded width where there is one).
    """

    rows: tuple[tuple[tuple[int, ...], int | None], ...]
    num_tokens: int
    num_overlong: int


def cost_model(shape: ModelShape) -> CostModel:
    """FLOPs of a sequence by its length, for balancing."""
    return CostModel.from_sizes(shape.body_parameters, shape.num_layers, shape.num_heads, shape.head_dim)


def check_budget(samples: Sequence[TokenPair], settings: BatchSection, budget: int, num_sharing: int) -> None:
    """Refuses a sample over the budget on every rank alike, before any of them waits for the others.

    Raises:
        OverBudgetError: a sample is longer than `budget` x `num_sharing` and `batch.overlong` is "refuse".
    """
    longest = max(map(num_tokens, samples), default=0)
    width = padded_width([longest], align=num_sharing) if settings.layout == "padded" else longest
    if settings.overlong == "refuse" and width > budget * num_sharing:
        raise OverBudgetError(longest, budget, num_sharing)


def plan_batch(
    samples: Sequence[TokenPair],
    settings: BatchSection,
    token_budget: int,
    cost: CostModel,
    num_sharing: int = 1,
) -> BatchPlan:
    """Plans one pass over `samples` under a strict `token_budget` per micro-batch and rank.

    `num_sharing` ranks share every row (sequence parallel): a row may hold that many times the budget, and its width
    is a multiple of them (`padded_width` is the one rule, here and where rows are laid out).

    Raises:
        OverBudgetError: a sample is longer than the budget and `batch.overlong` is "refuse".
    """
    token_budget *= num_sharing
    lengths = [num_tokens(sample) for sample in samples]
    if not samples:
        return BatchPlan((), 0, 0)
    if settings.layout == "padded":
        padded = plan_padded(
            lengths,
            token_budget,
            pad_to=settings.pad_to,
            align=num_sharing,
            overlong=settings.overlong,
        )
        return BatchPlan(
            tuple((micro_batch.rows, micro_batch.width) for micro_batch in padded.micro_batches),
            sum(lengths),
            padded.num_overlong,
        )
    groups = group_by_prompt(samples)
    packed = plan_packed_rows(
        [samples[group[0]].prompt_ids for group in groups],
        [[len(samples[index].response_ids) for index in group] for group in groups],
        token_budget,
        share_prefixes=settings.share_prefixes,
        overlong=settings.overlong,
        cost=cost,
    )
    rows = tuple(
        (tuple(groups[part.group][response] for part in row for response in part.responses), None)
        for row in packed.rows
    )
    return BatchPlan(rows, sum(lengths), packed.num_overlong)


def build_micro_batch(
    samples: Sequence[TokenPair],
    row: tuple[int, ...],
    width: int | None,
    share_prefixes: bool,
    device: torch.device,
    num_sharing: int = 1,
) -> MicroBatch:
    """Tensors of one planned micro-batch, made when its turn comes so that only one is held at a time."""
    if width is not None:
        pairs = [(samples[index].prompt_ids, samples[index].response_ids) for index in row]
        return MicroBatch(
            order=row,
            num_slots=len(row) * width,
            segments=((width, 0),) * len(row),
            num_response_tokens=sum(len(response) for _, response in pairs),
            inputs=padded_inputs(pairs, width, device),
        )
    members = [samples[index] for index in row]
    groups = group_by_prompt(members)
    order = tuple(row[member] for group in groups for member in group)
    items = [
        PackItem(members[group[0]].prompt_ids, tuple(members[member].response_ids for member in group))
        for group in groups
    ]
    pack = build_pack(items, share_prefixes)
    return MicroBatch(
        order=order,
        num_slots=padded_width([len(pack.token_ids)], align=num_sharing),
        segments=tuple((segment.length, int(pack.position_ids[segment.start])) for segment in pack.segments),
        num_response_tokens=len(pack.targets),
        inputs=packed_inputs(pack, device, num_sharing),
    )


def empty_inputs(settings: BatchSection, device: torch.device, num_sharing: int) -> ModelInputs:
    """The least that runs through a model: one prompt token and one response token, in the layout of the others.

    A rank that has no micro-batch left computes this while others compute theirs, so that all make the same collective
    calls; nothing of it is counted.
    """
    if settings.layout == "padded":
        return padded_inputs([((0,), (0,))], padded_width([2], align=num_sharing), device)
    return packed_inputs(build_pack([PackItem((0,), ((0,),))], share_prefixes=False), device, num_sharing)
