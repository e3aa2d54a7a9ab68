"""Turn a batch plan into the tensors of one forward call, the same for packed and padded layouts.

Shapes: B rows, T tokens of a row, R response tokens, E hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from paceline.batching.prefixes import PackPlan
from paceline.batching.side_arrays import SideArray, pad_side_arrays
from paceline.model.attention import AttentionPlan, PaddedPlan
from paceline.model.loading import CausalModel
from paceline.model.logprob_head import HeadSettings, response_logprobs
from paceline.model.packed_attention import packed_plan
from paceline.model.parallel.ulysses import UlyssesPlan, slice_rows, spread
from paceline.model.parallel.vocab_head import split_response_logprobs
from paceline.model.transfer import to_device


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One forward call and where its response tokens are.

    `source_R` indexes the flattened [B * T] hidden states: the position that predicts each response token. `plan` is
    made for the first `num_planned` columns; what follows is padding to a multiple of the sequence-parallel ranks.
    """

    input_ids_BT: Tensor
    position_ids_BT: Tensor
    plan: AttentionPlan
    source_R: Tensor
    targets_R: Tensor
    num_planned: int


def packed_inputs(pack: PackPlan, device: torch.device, width: int | None = None) -> ModelInputs:
    """Tensors of one packed row, filled up to `width` tokens (default: none) that the attention plan does not see."""
    num_tokens = len(pack.token_ids)
    missing = 0 if width is None else width - num_tokens
    position_ids_T = to_device(torch.from_numpy(pack.position_ids), device)
    return ModelInputs(
        input_ids_BT=to_device(torch.from_numpy(np.pad(pack.token_ids, (0, missing))), device)[None],
        position_ids_BT=F.pad(position_ids_T, (0, missing))[None],
        plan=packed_plan(pack.segments, position_ids_T),
        num_planned=num_tokens,
        source_R=to_device(torch.from_numpy(pack.source), device),
        targets_R=to_device(torch.from_numpy(pack.targets), device),
    )


def padded_inputs(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]],
    width: int,
    device: torch.device,
    num_rows: int | None = None,
) -> ModelInputs:
    """Tensors of (prompt, response) pairs padded on the right to `width` tokens, in `num_rows` rows (default: one for
    each pair; more are padding from end to end).

    The padding token is 0 and never matters: no real token attends to it, and labels come from lengths.

    Raises:
        ValueError: a sequence is longer than `width`, or there are more than `num_rows`.
    """
    tokens = SideArray([(*prompt, *response) for prompt, response in sequences], 0, np.int64)
    input_ids = pad_side_arrays({"input_ids": tokens}, width, num_rows)["input_ids"]
    firsts = [row * width + len(prompt) - 1 for row, (prompt, _) in enumerate(sequences)]
    sources = [
        np.arange(first, first + len(response))
        for first, (_, response) in zip(firsts, sequences, strict=True)
    ]
    targets = [np.asarray(response, dtype=np.int64) for _, response in sequences]
    positions_T = torch.arange(width, device=device)
    return ModelInputs(
        input_ids_BT=to_device(torch.from_numpy(input_ids), device),
        position_ids_BT=positions_T.expand(len(input_ids), width),
        plan=PaddedPlan(width, device),
        num_planned=width,
        source_R=to_device(torch.from_numpy(np.concatenate(sources)), device),
        targets_R=to_device(torch.from_numpy(np.concatenate(targets)), device),
    )


Head = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
"""(hidden states [R, E], targets [R]) -> tensors [R]: what is read off the last hidden states."""


def read_responses(model: CausalModel, inputs: ModelInputs, head: Head) -> tuple[Tensor, ...]:
    """What `head` reads at every response token, on every rank that shares this forward pass.

    With sequence parallelism each rank runs `head` on the response tokens its own slice of the row predicts, and all
    get all values; a gradient reaches each rank for its own tokens only.
    """
    return model.call(partial(_read, model, inputs, head))


def _read(model: CausalModel, inputs: ModelInputs, head: Head) -> tuple[Tensor, ...]:
    peers = model.peers.sequence
    if peers.size == 1:
        hidden_TE = model.hidden(inputs.input_ids_BT, inputs.position_ids_BT, inputs.plan)
        return head(hidden_TE[inputs.source_R], inputs.targets_R)
    part = slice_rows(inputs.input_ids_BT.shape[1], inputs.source_R, peers)
    columns = slice(part.start, part.start + part.length)
    hidden_TE = model.hidden(
        inputs.input_ids_BT[:, columns],
        inputs.position_ids_BT[:, columns],
        UlyssesPlan(inputs.plan, inputs.num_planned, peers),
    )
    values = head(hidden_TE[part.source_R], inputs.targets_R[part.own_R])
    return tuple(spread(value, part.own_R, len(inputs.targets_R), peers) for value in values)


def score(model: CausalModel, inputs: ModelInputs, settings: HeadSettings) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every response token, float32 [R] and [R]."""
    logprob_R, entropy_R = read_responses(model, inputs, partial(_logprob_head, model, settings))
    return logprob_R, entropy_R


def _logprob_head(
    model: CausalModel, settings: HeadSettings, hidden_RE: Tensor, targets_R: Tensor
) -> tuple[Tensor, ...]:
    weight_VE, bias_V = model.head_weight_VE, model.head_bias_V
    if model.peers.tensor.size == 1:
        return response_logprobs(hidden_RE, weight_VE, bias_V, targets_R, settings)
    assert isinstance(weight_VE, DTensor)
    return split_response_logprobs(
        hidden_RE,
        weight_VE.to_local(),
        bias_V.to_local() if isinstance(bias_V, DTensor) else None,
        targets_R,
        settings,
        model.peers.tensor,
        vocabulary=len(weight_VE),
    )
