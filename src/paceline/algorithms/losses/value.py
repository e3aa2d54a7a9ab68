"""The critic's loss: squared error to the returns, with the new value kept near the old. Shapes: T response tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValueInputs:
    """Response tokens of a micro-batch; every tensor is [T], and only `value_T` carries a gradient.

    `old_value_T` are the critic's values before the rollout's first update, `return_T` the targets made from them.
    `weight_T` comes from `aggregation_weights`. What stands at a token of mask 0 has no influence, even if not finite.
    """

    value_T: Tensor
    old_value_T: Tensor
    return_T: Tensor
    weight_T: Tensor
    loss_mask_T: Tensor


@dataclass(frozen=True, slots=True)
class ValueTerms:
    """Per-token loss with its graph, 0 at mask 0; and, detached, where the clip raised it."""

    loss_T: Tensor
    clipped_T: Tensor


def value_loss(inputs: ValueInputs, clip: float) -> ValueTerms:
    """0.5 * max((V - R)^2, (V_clip - R)^2) with V_clip = V_old + clamp(V - V_old, -clip, clip); clip 0 = no clipping.

    The form of OpenAI Baselines' PPO2 (2017): the larger error counts, so a value that has moved further than `clip`
    towards its target is held (gradient 0), and one that has moved away from it is always pulled back. The factor 0.5
    makes the gradient V - R. A token counts as clipped when the clipped error is the strictly larger one.
    """
    out_T = inputs.loss_mask_T == 0
    value_T = inputs.value_T.masked_fill(out_T, 0.0)
    old_T = inputs.old_value_T.detach().masked_fill(out_T, 0.0)
    return_T = inputs.return_T.detach().masked_fill(out_T, 0.0)
    error_T = (value_T - return_T).square()
    if clip == 0.0:
        return ValueTerms((0.5 * error_T).masked_fill(out_T, 0.0), torch.zeros_like(out_T))
    clipped_error_T = (old_T + (value_T - old_T).clamp(-clip, clip) - return_T).square()
    loss_T = 0.5 * torch.maximum(error_T, clipped_error_T)
    return ValueTerms(loss_T.masked_fill(out_T, 0.0), (clipped_error_T > error_T).detach() & ~out_T)
