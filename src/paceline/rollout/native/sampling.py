"""Draw tokens from logits so that a sample depends on its own seed and position only, never on its neighbours.

Shapes: R running samples, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_MASK = np.uint64(0xFFFFFFFFFFFFFFFF)


def uniform_numbers(
    seeds: Sequence[int], positions: Sequence[int]
) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """One number in [0, 1) per (seed, position): SplitMix64 (Steele, Lea, Flood 2014) as a counter-based generator."""
    with np.errstate(over="ignore"):
        state = np.asarray(seeds, dtype=np.uint64)
        state = state + (np.asarray(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sample_tokens(
    logits_RV: Tensor, seeds: Sequence[int], positions: Sequence[int], greedy: bool = False
) -> tuple[Tensor, Tensor]:
    """Token and its log-probability for each row of temperature-scaled logits, int64 [R] and float32 [R].

    Inverse-CDF sampling: one uniform number per row walks the cumulated probabilities.
    """
    log_p_RV = logits_RV.log_softmax(dim=-1)
    if greedy:
        tokens_R = log_p_RV.argmax(dim=-1)
    else:
        numbers = torch.from_numpy(uniform_numbers(seeds, positions)).to(logits_RV.device, torch.float32)
        cdf_RV = log_p_RV.exp().cumsum(dim=-1)
        # scaled by the last entry: rounding leaves the total a hair off 1
        thresholds_R = numbers * cdf_RV[:, -1]
        tokens_R = torch.searchsorted(cdf_RV, thresholds_R[:, None], right=True).squeeze(-1)
        tokens_R = tokens_R.clamp_(max=logits_RV.shape[-1] - 1)
    return tokens_R, log_p_RV.gather(-1, tokens_R[:, None]).squeeze(-1)
