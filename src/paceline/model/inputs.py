"""Turn a batch plan into the tensors of one forward call, the same for packed and padded layouts.

Shapes: B rows, T tokens of a row, R response tokens, E hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.batching.prefixes import PackPlan
from paceline.model.attention import AttentionPlan, PaddedPlan
from paceline.model.loading import CausalModel
from paceline.model.logprob_head import HeadSettings, response_logprobs
from paceline.model.packed_attention import packed_plan


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """One forward call and where its response tokens are.

    `source_R` indexes the flattened [B * T] hidden states: the position that predicts each response token.
    """

    input_ids_BT: Tensor
    position_ids_BT: Tensor
    plan: AttentionPlan
    source_R: Tensor
    targets_R: Tensor


def packed_inputs(pack: PackPlan, device: torch.device) -> ModelInputs:
    """Tensors of one packed row."""
    position_ids_T = torch.from_numpy(pack.position_ids).to(device)
    return ModelInputs(
        input_ids_BT=torch.from_numpy(pack.token_ids).to(device)[None],
        position_ids_BT=position_ids_T[None],
        plan=packed_plan(pack.segments, position_ids_T),
        source_R=torch.from_numpy(pack.source).to(device),
        targets_R=torch.from_numpy(pack.targets).to(device),
    )


def padded_inputs(
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]], width: int, device: torch.device
) -> ModelInputs:
    """Tensors of (prompt, response) pairs padded on the right to `width` tokens.

    The padding token is 0 and never matters: no real token attends to it, and labels come from lengths.

    Raises:
        ValueError: a sequence is longer than `width`.
    """
    input_ids = np.zeros((len(sequences), width), dtype=np.int64)
    sources, targets = [], []
    for row, (prompt, response) in enumerate(sequences):
        length = len(prompt) + len(response)
        if length > width:
            raise ValueError(f"a sequence of {length} tokens does not fit the padded width of {width}")
        input_ids[row, :length] = [*prompt, *response]
        first = row * width + len(prompt) - 1
        sources.append(np.arange(first, first + len(response)))
        targets.append(np.asarray(response, dtype=np.int64))
    positions_T = torch.arange(width, device=device)
    return ModelInputs(
        input_ids_BT=torch.from_numpy(input_ids).to(device),
        position_ids_BT=positions_T.expand(len(sequences), width),
        plan=PaddedPlan(width, device),
        source_R=torch.from_numpy(np.concatenate(sources)).to(device),
        targets_R=torch.from_numpy(np.concatenate(targets)).to(device),
    )


def score(model: CausalModel, inputs: ModelInputs, settings: HeadSettings) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every response token, float32 [R] and [R]."""
    hidden_TE = model.hidden(inputs.input_ids_BT, inputs.position_ids_BT, inputs.plan)
    return response_logprobs(
        hidden_TE[inputs.source_R], model.head_weight_VE, model.head_bias_V, inputs.targets_R, settings
    )
