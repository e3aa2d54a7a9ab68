"""Generalised advantage estimation over the tokens of a step, and what a critic is measured by. Free of torch.

A sample's *actions* are its loss tokens. Tokens of mask 0 (a tool's output, a header the environment wrote) were not
chosen by the policy: the recursion steps over them, from one action to the next, as if they were part of the
transition. They get no advantage and no return, and their values, whatever they are, reach nothing.

Shapes: L response tokens of one sample, N samples, A actions of the longest sample.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.floating]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TokenCredit:
    """Advantage and return (the value's target) of every response token of one sample; 0 where the mask is 0."""

    advantages_L: Float32Array
    returns_L: Float32Array


def token_rewards(
    score: float, loss_mask_L: FloatArray, kl_penalties_L: FloatArray | None = None
) -> FloatArray:
    """The score at the sample's last loss token, less each token's KL penalty; float64 [L], all 0 without loss tokens.

    The last *loss* token, not the last token: a sample that ends in a tool's output is credited at its last action.
    """
    rewards_L = np.zeros(len(loss_mask_L))
    actions = np.flatnonzero(loss_mask_L)
    if len(actions):
        rewards_L[actions[-1]] = score
        if kl_penalties_L is not None:
            rewards_L[actions] -= kl_penalties_L[actions]
    return rewards_L


def estimate_advantages(
    rewards: Sequence[FloatArray],
    values: Sequence[FloatArray],
    loss_masks: Sequence[FloatArray],
    gamma: float,
    gae_lambda: float,
) -> list[TokenCredit]:
    """GAE (Schulman et al. 2016, arXiv 1506.02438, eq. 16) of every sample, each [L] as given.

    Over the actions t of a sample, with the value after its last action 0 (an episode ends with its response, also one
    cut at the token limit):
        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t = delta_t + gamma * lambda * A_{t+1},  return_t = A_t + V_t
    `values` are the critic's before the action. Raises `ValueError` when a sample's arrays differ in length, or a
    reward or value of a loss token is not finite.
    """
    actions = [np.flatnonzero(mask_L) for mask_L in loss_masks]
    rewards_NA = _from_the_end(rewards, actions, "reward")
    values_NA = _from_the_end(values, actions, "value")
    next_values_NA = np.zeros_like(values_NA)
    next_values_NA[:, 1:] = values_NA[:, :-1]
    deltas_NA = rewards_NA + gamma * next_values_NA - values_NA
    advantages_NA = np.zeros_like(deltas_NA)
    carry_N = np.zeros(len(actions))
    for column in range(deltas_NA.shape[1]):
        carry_N = deltas_NA[:, column] + gamma * gae_lambda * carry_N
        advantages_NA[:, column] = carry_N
    return [
        _spread(row_A, value_A, index, len(mask_L))
        for row_A, value_A, index, mask_L in zip(advantages_NA, values_NA, actions, loss_masks, strict=True)
    ]


def whiten(
    values: Sequence[FloatArray], loss_masks: Sequence[FloatArray], std_floor: float
) -> list[Float32Array]:
    """(x - mean) / std over the loss tokens of *all* arrays: one affine map for the whole batch, 0 where the mask is 0.

    Contract: population standard deviation, no epsilon; below `std_floor` every result is 0, as for advantages of
    scores. Give it the samples of all ranks: statistics of a shard would centre each shard on its own mean.
    """
    pooled = _pooled(values, loss_masks)
    if not len(pooled):
        return [np.zeros(len(value_L), dtype=np.float32) for value_L in values]
    mean = math.fsum(pooled) / len(pooled)
    std = math.sqrt(math.fsum((pooled - mean) ** 2) / len(pooled))
    scale = 0.0 if std < std_floor else 1.0 / std
    return [
        np.where(mask_L > 0, (value_L - mean) * scale, 0.0).astype(np.float32)
        for value_L, mask_L in zip(values, loss_masks, strict=True)
    ]


def explained_variance(
    values: Sequence[FloatArray], returns: Sequence[FloatArray], loss_masks: Sequence[FloatArray]
) -> float | None:
    """1 - Var(return - value) / Var(return) over all loss tokens: 1 is a perfect critic, 0 a constant one.

    None where it has no meaning: fewer than two loss tokens, or returns that are all equal.
    """
    returns_A = _pooled(returns, loss_masks)
    if len(returns_A) < 2 or returns_A.min() == returns_A.max():
        return None
    return float(1.0 - (returns_A - _pooled(values, loss_masks)).var() / returns_A.var())


def masked_mean(values: Sequence[FloatArray], loss_masks: Sequence[FloatArray]) -> float | None:
    """Mean over all loss tokens; None when there are none."""
    pooled = _pooled(values, loss_masks)
    return float(pooled.mean()) if len(pooled) else None


def _pooled(values: Sequence[FloatArray], loss_masks: Sequence[FloatArray]) -> npt.NDArray[np.float64]:
    kept = [value_L[mask_L > 0] for value_L, mask_L in zip(values, loss_masks, strict=True)]
    return np.concatenate([*kept, np.zeros(0)]).astype(np.float64)


def _from_the_end(
    arrays: Sequence[FloatArray], actions: Sequence[npt.NDArray[np.intp]], what: str
) -> npt.NDArray[np.float64]:
    """Actions of every sample, the last one first, so that all samples end in column 0; [N, A]."""
    found_NA = np.zeros((len(arrays), max(map(len, actions), default=0)))
    for row, (array_L, index) in enumerate(zip(arrays, actions, strict=True)):
        if len(index) and index[-1] >= len(array_L):
            raise ValueError(f"sample {row}: {len(array_L)} {what}s do not cover its loss mask")
        found_NA[row, : len(index)] = array_L[index][::-1]
    if not np.isfinite(found_NA).all():
        row = int(np.flatnonzero(~np.isfinite(found_NA).all(axis=1))[0])
        raise ValueError(f"sample {row}: a {what} at a loss token is not finite")
    return found_NA


def _spread(
    advantages_A: FloatArray, values_A: FloatArray, actions: npt.NDArray[np.intp], num_tokens: int
) -> TokenCredit:
    advantages_L = np.zeros(num_tokens, dtype=np.float32)
    returns_L = np.zeros(num_tokens, dtype=np.float32)
    own = slice(0, len(actions))
    advantages_L[actions] = advantages_A[own][::-1]
    returns_L[actions] = (advantages_A[own] + values_A[own])[::-1]
    return TokenCredit(advantages_L, returns_L)
