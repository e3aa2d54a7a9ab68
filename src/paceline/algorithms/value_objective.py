"""A micro-batch's part of the critic's objective, and what is worth recording of it. Shapes: T response tokens."""

from collections.abc import Sequence

import torch

from paceline.algorithms.losses.value import ValueInputs, value_loss
from paceline.algorithms.objective import Metrics, ObjectiveOutput, PendingMetrics


def value_objective(inputs: ValueInputs, clip: float) -> ObjectiveOutput:
    """sum over T of weight * value loss; `clip` 0 = no clipping.

    The loss is a partial sum over the mini-batch's denominator, and so is `critic/loss` (weight 1).
    `critic/clip_fraction` is a mean over this micro-batch's loss tokens, absent when there are none.
    """
    terms = value_loss(inputs, clip)
    loss = (inputs.weight_T * terms.loss_T).sum()
    scalars = [loss.detach(), terms.clipped_T.sum(), (inputs.loss_mask_T != 0).sum()]
    return ObjectiveOutput(loss, PendingMetrics(torch.stack([s.double() for s in scalars]), _read))


def _read(numbers: Sequence[float]) -> Metrics:
    total, num_clipped, count = numbers
    metrics: Metrics = {"critic/loss": (total, 1.0)}
    if count:
        metrics["critic/clip_fraction"] = (num_clipped / count, count)
    return metrics
