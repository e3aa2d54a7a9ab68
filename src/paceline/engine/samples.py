"""What the trainer is given: one completion with everything its loss needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paceline.algorithms.denominators import Denominator

FloatArray = npt.NDArray[np.float32]


class TokenPair(Protocol):
    """What planning needs of a sample, whatever the role that trains on it."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Tokens that are read only."""
        ...

    @property
    def response_ids(self) -> tuple[int, ...]:
        """Tokens that get a value each; at least one."""
        ...


def num_tokens(sample: TokenPair) -> int:
    """Prompt plus response."""
    return len(sample.prompt_ids) + len(sample.response_ids)


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One completion. Arrays hold one entry per response token; log-probs in nats.

    `rollout_logprobs` are those it was sampled with; `old_logprobs` is None when the detached current value serves;
    `ref_logprobs` is None without a KL term. `loss_mask` is 1 where the token is trained on. `values` are the critic's
    before the token and before the rollout's first update, `returns` what it should have said; None without a critic.
    """

    prompt_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    loss_mask: FloatArray
    advantages: FloatArray
    rollout_logprobs: FloatArray
    old_logprobs: FloatArray | None = None
    ref_logprobs: FloatArray | None = None
    values: FloatArray | None = None
    returns: FloatArray | None = None

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that the loss counts."""
        return int(self.loss_mask.sum())

    @property
    def num_tokens(self) -> int:
        """Prompt plus response."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def has_advantage(self) -> bool:
        """Whether any trained token has an advantage other than zero."""
        return bool(np.any(self.advantages * self.loss_mask))


def group_by_prompt(samples: Sequence[TokenPair]) -> list[list[int]]:
    """Indices of samples that share a prompt's tokens, prompts in order of first appearance."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.prompt_ids, []).append(index)
    return list(groups.values())


def denominator_of(samples: Sequence[TrainSample], max_response_tokens: int) -> Denominator:
    """Counts of an optimiser update over the samples that have at least one loss token."""
    counted = [sample for sample in samples if sample.num_loss_tokens]
    return Denominator(
        num_tokens=sum(sample.num_loss_tokens for sample in counted),
        num_sequences=len(counted),
        num_groups=len({sample.prompt_id for sample in counted}),
        max_response_tokens=max_response_tokens,
    )
