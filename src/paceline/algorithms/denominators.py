"""One denominator per optimiser update, and the weight it gives every token.

Counts are taken over the whole mini-batch (all ranks) before it is split; `loss = sum(weight_T * loss_T)` over all
micro-batches and ranks is then the aggregated loss itself. Nothing downstream divides again.

Shapes: T response tokens of a micro-batch, N its samples.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.config.schema import Aggregation


@dataclass(frozen=True, slots=True)
class Denominator:
    """Counts of one optimiser update over the samples with at least one loss token, over all ranks.

    A sample without a loss token (masked as truncated, or without a verdict) is in no count, as it is in no
    numerator. `max_response_tokens` is the constant of seq-mean-token-sum-norm: the longest response the run
    allows (`rollout.max_new_tokens`), whatever lengths were sampled. Raises `ValueError` on a negative count.
    """

    num_tokens: int
    num_sequences: int
    num_groups: int
    max_response_tokens: int

    def __post_init__(self) -> None:
        if min(self.num_tokens, self.num_sequences, self.num_groups, self.max_response_tokens) < 0:
            raise ValueError(f"counts of a denominator are at least 0: {self}")


def aggregation_weights(
    aggregation: Aggregation,
    sample_index_T: Tensor,
    loss_mask_T: Tensor,
    tokens_per_sample_N: Tensor,
    denominator: Denominator,
) -> Tensor:
    """Weight of every token's loss, float [T]; 0 where the mask is 0, and everywhere when there is nothing to count.

    With B sequences, L_i loss tokens of sequence i:
        token-mean               1 / sum_i L_i           (DAPO, Yu et al. 2025)
        seq-mean-token-mean      1 / (B * L_i)           (GRPO, Shao et al. 2024)
        seq-mean-token-sum       1 / B
        seq-mean-token-sum-norm  1 / (B * L_max)         (Dr. GRPO, Liu et al. 2025; L_max constant over the run)

    `sample_index_T` is the row of `tokens_per_sample_N` a token belongs to; `tokens_per_sample_N` counts the loss
    tokens of the whole sample, so a sample may be split over micro-batches. Raises `ValueError` on an unknown name.
    """
    mask_T = loss_mask_T.to(torch.promote_types(tokens_per_sample_N.dtype, torch.float32))
    match aggregation:
        case "token-mean":
            return _over(mask_T, denominator.num_tokens)
        case "seq-mean-token-sum":
            return _over(mask_T, denominator.num_sequences)
        case "seq-mean-token-sum-norm":
            return _over(mask_T, denominator.num_sequences * denominator.max_response_tokens)
        case "seq-mean-token-mean":
            # a sample without loss tokens has mask 0 everywhere, so its count is never really divided by
            length_T = tokens_per_sample_N.clamp(min=1)[sample_index_T]
            return _over(mask_T / length_T, denominator.num_sequences)
    raise ValueError(f"there is no aggregation named {aggregation!r}")


def _over(weight_T: Tensor, count: int) -> Tensor:
    return weight_T / count if count else torch.zeros_like(weight_T)
