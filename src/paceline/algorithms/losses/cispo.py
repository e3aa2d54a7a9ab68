"""Clipped importance-sampling weights on REINFORCE. Shapes: T response tokens."""

from paceline.algorithms.losses.inputs import LossInputs, LossTerms, bounded_exp, clip_range
from paceline.config.schema import AlgorithmSection


def cispo_loss(inputs: LossInputs, settings: AlgorithmSection) -> LossTerms:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] * A * logprob per token (MiniMax-M1, Chen et al. 2025).

    The weight is clipped, not the update: every loss token keeps a gradient. A token counts as clipped when its
    weight was, and its advantage is not 0. clip_low >= 1 means no lower bound.
    """
    low, high = clip_range(settings)
    ratio_T = bounded_exp(inputs.log_ratio_T.detach())
    weight_T = ratio_T.clamp(low, high)
    # mask 0 must not meet an infinite log-prob: 0 * inf is NaN
    logprob_T = inputs.logprob_T.masked_fill(inputs.masked_out_T, 0.0)
    clipped_T = (weight_T != ratio_T) & (inputs.advantage_T != 0)
    return LossTerms(-(weight_T * inputs.advantage_T * logprob_T), ratio_T, clipped_T)
