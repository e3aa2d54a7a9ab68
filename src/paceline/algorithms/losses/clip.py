"""PPO's clipped surrogate per token, as GRPO, Dr. GRPO, DAPO and RLOO use it. Shapes: T response tokens."""

import torch

from paceline.algorithms.losses.inputs import (
    LossInputs,
    LossTerms,
    bounded_exp,
    clip_range,
    clipped_surrogate,
)
from paceline.config.schema import AlgorithmSection


def clip_loss(inputs: LossInputs, settings: AlgorithmSection) -> LossTerms:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) per token (Schulman et al. 2017; two bounds: DAPO, 2025).

    With `dual_clip` = c, the loss of a negative advantage is at most -c A (Ye et al. 2020, "Mastering Complex
    Control in MOBA Games"). A token counts as clipped when either clip changed its loss, which cuts its gradient.
    """
    low, high = clip_range(settings)
    ratio_T = bounded_exp(inputs.log_ratio_T)
    advantage_T = inputs.advantage_T
    surrogate_T, clipped_T = clipped_surrogate(ratio_T, advantage_T, low, high)
    if settings.dual_clip is not None:
        floor_T = settings.dual_clip * advantage_T
        below_T = (advantage_T < 0) & (surrogate_T < floor_T)
        surrogate_T = torch.where(below_T, floor_T, surrogate_T)
        clipped_T = clipped_T | below_T
    return LossTerms(-surrogate_T, ratio_T.detach(), clipped_T)
