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
        tokens_R = draw_by_numbers(log_p_RV, numbers)
    return tokens_R, log_p_RV.gather(-1, tokens_R[:, None]).squeeze(-1)


def draw_by_numbers(log_p_RV: Tensor, numbers_R: Tensor) -> Tensor:
    """The token at which the cumulated probabilities pass each row's number, int64 [R].

    In float32 a number just below 1 may be 1, and pass them all: it stands for the last token that adds to them, never
    for one behind it that cannot be.
    """
    cdf_RV = log_p_RV.exp().cumsum(dim=-1)
    totals_R1 = cdf_RV[:, -1:].contiguous()  # rounding leaves them a hair off 1
    tokens_R1 = torch.searchsorted(cdf_RV, numbers_R[:, None] * totals_R1, right=True)
    last_R1 = torch.searchsorted(cdf_RV, totals_R1).clamp(max=cdf_RV.shape[-1] - 1)  # NaNs pass nothing
    return tokens_R1.minimum(last_R1).squeeze(-1)
