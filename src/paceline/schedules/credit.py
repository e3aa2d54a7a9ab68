"""Scored groups to training samples: shaped rewards, KL in the reward, advantages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

import numpy as np

from paceline.algorithms.advantages import Advantages, compute_advantages
from paceline.algorithms.gae import FloatArray, estimate_advantages, token_rewards, whiten
from paceline.algorithms.kl import kl_penalties
from paceline.algorithms.reward_shaping import overlong_penalty
from paceline.config.schema import AlgorithmSection
from paceline.engine.samples import TrainSample
from paceline.schedules.setup import Run
from paceline.types import Group, Sample

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CreditedBatch:
    """A step's training samples, group by group, and how their credit came about.

    `rewards` are the shaped rewards by group, None where there is no verdict. `advantages` says what became of the
    groups where credit comes from comparing their members; None where it comes from a critic.
    """

    groups: tuple[tuple[TrainSample, ...], ...]
    rewards: tuple[tuple[float | None, ...], ...]
    advantages: Advantages | None

    @property
    def samples(self) -> list[TrainSample]:
        """All samples, in order of their groups."""
        return [sample for group in self.groups for sample in group]


def assign_credit(run: Run, groups: Sequence[Group]) -> CreditedBatch:
    """Turns verdicts into advantages. A sample without a verdict gets no advantage and a loss mask of zeros.

    The reference model, if there is one, scores here: its KL belongs to the reward or to the loss. So does the critic,
    if there is one: its values are from before the rollout's first update.
    """
    samples = [_train_sample(run, group, sample) for group in groups for sample in group.samples]
    if run.config.algorithm.kl_coefficient > 0.0:
        references = run.trainer.score(samples, "ref_logprob", run.reference)
        samples = [replace(s, ref_logprobs=found) for s, found in zip(samples, references, strict=True)]
    if run.critic is not None:
        samples = run.critic.with_values(samples)
    with run.ledger.span("advantage"):
        outcomes = [_outcome(run, group, index) for group in groups for index in range(len(group.samples))]
        penalties = [_kl_penalties(run.config.algorithm, sample) for sample in samples]
        rewards = [
            None if outcome is None else outcome - (0.0 if penalty is None else float(penalty.sum()))
            for outcome, penalty in zip(outcomes, penalties, strict=True)
        ]
        by_group = tuple(_regrouped(rewards, groups))
        if run.critic is None:
            samples, advantages = _credit_by_group(run.config.algorithm, samples, by_group)
        else:
            samples, advantages = credit_by_value(run.config.algorithm, samples, outcomes, penalties), None
    return CreditedBatch(tuple(_regrouped(samples, groups)), by_group, advantages)


def credit_by_value(
    algorithm: AlgorithmSection,
    samples: Sequence[TrainSample],
    outcomes: Sequence[float | None],
    penalties: Sequence[FloatArray | None],
) -> list[TrainSample]:
    """Advantages and returns of every loss token by GAE on the samples' values, whitened over all of them if asked for.

    `outcomes` are paid at a sample's last loss token, `penalties` taken from each. Returns are never whitened: they
    are what the critic learns, in units of reward.
    """
    masked = [
        _without_loss(s) if outcome is None else s for s, outcome in zip(samples, outcomes, strict=True)
    ]
    masks = [sample.loss_mask for sample in masked]
    rewards = [
        token_rewards(outcome or 0.0, mask, penalty)
        for outcome, mask, penalty in zip(outcomes, masks, penalties, strict=True)
    ]
    values = [sample.values for sample in masked if sample.values is not None]
    credits = estimate_advantages(rewards, values, masks, algorithm.gamma, algorithm.gae_lambda)
    advantages = [credit.advantages_L for credit in credits]
    if algorithm.whiten_advantages:
        advantages = whiten(advantages, masks, algorithm.std_floor)
    return [
        replace(sample, advantages=advantage, returns=credit.returns_L)
        for sample, advantage, credit in zip(masked, advantages, credits, strict=True)
    ]


def _credit_by_group(
    algorithm: AlgorithmSection, samples: Sequence[TrainSample], rewards: Sequence[tuple[float | None, ...]]
) -> tuple[list[TrainSample], Advantages]:
    """One advantage for all tokens of a sample, from its group's or the batch's rewards."""
    assert algorithm.advantage is not None
    advantages = compute_advantages(algorithm.advantage, rewards, algorithm.std_floor)
    credited = [
        _with_advantage(sample, value, valid)
        for sample, value, valid in zip(
            samples, chain(*advantages.values), chain(*advantages.valid), strict=True
        )
    ]
    return credited, advantages


def _train_sample(run: Run, group: Group, sample: Sample) -> TrainSample:
    mask = np.asarray(sample.loss_mask, dtype=np.float32)
    if run.config.algorithm.mask_truncated and sample.finish_reason != "stop":
        mask = np.zeros_like(mask)
    return TrainSample(
        prompt_id=sample.prompt_id,
        prompt_ids=sample.prompt_token_ids or group.prompt.token_ids,
        response_ids=sample.token_ids,
        loss_mask=mask,
        advantages=np.zeros(len(mask), dtype=np.float32),
        rollout_logprobs=np.asarray(sample.logprobs, dtype=np.float32),
    )


def _regrouped(items: Sequence[T], groups: Sequence[Group]) -> Iterator[tuple[T, ...]]:
    remaining = iter(items)
    for group in groups:
        yield tuple(next(remaining) for _ in group.samples)


def _outcome(run: Run, group: Group, index: int) -> float | None:
    """What a whole sample earns: its score less the over-long penalty; None without a verdict."""
    score = group.verdicts[index].score
    if score is None:
        return None
    cache = run.config.algorithm.overlong_cache or 0
    return score + overlong_penalty(
        len(group.samples[index].token_ids), run.config.rollout.max_new_tokens, cache
    )


def _kl_penalties(algorithm: AlgorithmSection, sample: TrainSample) -> FloatArray | None:
    """What the KL takes from each token's reward; None where it does not belong to the reward."""
    if sample.ref_logprobs is None or algorithm.kl_placement != "reward":
        return None
    return kl_penalties(
        sample.rollout_logprobs,
        sample.ref_logprobs,
        sample.loss_mask,
        algorithm.kl_estimator,
        algorithm.kl_coefficient,
        algorithm.kl_cap,
    )


def _with_advantage(sample: TrainSample, advantage: float, valid: bool) -> TrainSample:
    if not valid:
        return _without_loss(sample)
    return replace(sample, advantages=np.full(len(sample.loss_mask), advantage, dtype=np.float32))


def _without_loss(sample: TrainSample) -> TrainSample:
    return replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
