"""Small micro-batches for the tests of the algorithms. Shapes: T response tokens, N samples."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.algorithms.denominators import Denominator, aggregation_weights
from paceline.algorithms.losses import LossInputs
from paceline.config.presets import PRESETS
from paceline.config.schema import AlgorithmSection


def settings_of(name: str = "grpo", **changes: Any) -> AlgorithmSection:
    """An algorithm's settings with its preset applied."""
    return AlgorithmSection(**{"name": name, **PRESETS[name], **changes})


def tokens(*values: float, grad: bool = False) -> Tensor:
    """A float64 tensor."""
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def single_sample(logprob_T: Tensor, old_logprob_T: Tensor, advantage_T: Tensor) -> LossInputs:
    """All tokens in one sample, all trained on, each with weight 1."""
    ones_T = torch.ones_like(advantage_T)
    index_T = torch.zeros(len(advantage_T), dtype=torch.long)
    return LossInputs(logprob_T, old_logprob_T, advantage_T, ones_T, ones_T, index_T, 1)


def on_policy(
    logprob_T: Tensor,
    loss_T: Tensor,
    mask_T: Tensor,
    lengths: Sequence[int],
    counts: Denominator,
    aggregation: Any,
) -> LossInputs:
    """Inputs whose clipped loss is `loss_T`, with gradient loss * d logprob: ratio 1, advantage the loss's opposite."""
    index_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    loss_tokens_N = torch.zeros(len(lengths), dtype=mask_T.dtype).index_add_(0, index_T, mask_T)
    weight_T = aggregation_weights(aggregation, index_T, mask_T, loss_tokens_N, counts)
    return LossInputs(logprob_T, logprob_T.detach(), -loss_T, weight_T, mask_T, index_T, len(lengths))
