"""Group Sequence Policy Optimization, token form. Shapes: T response tokens, N samples of a micro-batch."""

import torch
from torch import Tensor

from paceline.algorithms.losses.inputs import (
    MAX_LOG_RATIO,
    LossInputs,
    LossTerms,
    clip_range,
    clipped_surrogate,
)
from paceline.config.schema import AlgorithmSection


def gspo_loss(inputs: LossInputs, settings: AlgorithmSection) -> LossTerms:
    """Clipped surrogate of the sequence ratio s = exp(mean over the sample's loss tokens of log(new / old)).

    Each token carries sg[s] * new_t / sg[new_t] (Zheng et al. 2025, GSPO-token): its value is s, its gradient s times
    that of its own log-prob, and with one advantage per sample and seq-mean-token-mean it is GSPO exactly. A sample's
    tokens must lie in one micro-batch. All loss tokens of a clipped sequence count as clipped.
    """
    low, high = clip_range(settings)
    log_s_T = sequence_log_ratio(inputs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[inputs.sample_index_T]
    own_T = inputs.logprob_T.masked_fill(inputs.masked_out_T, 0.0)
    ratio_T = torch.exp(log_s_T + (own_T - own_T.detach()))
    surrogate_T, clipped_T = clipped_surrogate(ratio_T, inputs.advantage_T, low, high)
    return LossTerms(-surrogate_T, ratio_T.detach(), clipped_T)


def sequence_log_ratio(inputs: LossInputs) -> Tensor:
    """Detached mean log-ratio over each sample's loss tokens, [N]; 0 for a sample without any."""
    log_ratio_T = inputs.log_ratio_T.detach()
    mask_T = inputs.loss_mask_T.to(log_ratio_T.dtype)
    sum_N = log_ratio_T.new_zeros(inputs.num_samples).index_add_(0, inputs.sample_index_T, log_ratio_T)
    count_N = log_ratio_T.new_zeros(inputs.num_samples).index_add_(0, inputs.sample_index_T, mask_T)
    return sum_N / count_N.clamp(min=1)
