"""Scored groups to training samples: shaped rewards, KL in the reward, advantages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.algorithms.advantages import Advantages, compute_advantages
from paceline.algorithms.kl import kl_in_reward
from paceline.algorithms.reward_shaping import overlong_penalty
from paceline.engine.samples import TrainSample
from paceline.schedules.setup import Run
from paceline.types import Group, Sample


@dataclass(frozen=True, slots=True)
class CreditedBatch:
    """A step's training samples, group by group, and how their credit came about.

    `rewards` are the shaped rewards by group, None where there is no verdict.
    """

    groups: tuple[tuple[TrainSample, ...], ...]
    rewards: tuple[tuple[float | None, ...], ...]
    advantages: Advantages

    @property
    def samples(self) -> list[TrainSample]:
        """All samples, in order of their groups."""
        return [sample for group in self.groups for sample in group]


def assign_credit(run: Run, groups: Sequence[Group]) -> CreditedBatch:
    """Turns verdicts into advantages. A sample without a verdict gets no advantage and a loss mask of zeros.

    The reference model, if there is one, scores here: its KL belongs to the reward or to the loss.
    """
    algorithm = run.config.algorithm
    samples = [_train_sample(run, group, sample) for group in groups for sample in group.samples]
    if algorithm.kl_coefficient > 0.0:
        references = run.trainer.score(samples, "ref_logprob", run.reference)
        samples = [replace(s, ref_logprobs=found) for s, found in zip(samples, references, strict=True)]
    with run.ledger.span("advantage"):
        by_group = _regroup(samples, groups)
        rewards = tuple(
            tuple(_shaped_reward(run, group, index, sample) for index, sample in enumerate(members))
            for group, members in zip(groups, by_group, strict=True)
        )
        assert algorithm.advantage is not None
        advantages = compute_advantages(algorithm.advantage, rewards, algorithm.std_floor)
        credited = tuple(
            tuple(
                _with_advantage(sample, value, valid)
                for sample, value, valid in zip(members, values, valids, strict=True)
            )
            for members, values, valids in zip(by_group, advantages.values, advantages.valid, strict=True)
        )
    return CreditedBatch(credited, rewards, advantages)


def _train_sample(run: Run, group: Group, sample: Sample) -> TrainSample:
    mask = np.asarray(sample.loss_mask, dtype=np.float32)
    if run.config.algorithm.mask_truncated and sample.finish_reason != "stop":
        mask = np.zeros_like(mask)
    return TrainSample(
        prompt_id=sample.prompt_id,
        prompt_ids=group.prompt.token_ids,
        response_ids=sample.token_ids,
        loss_mask=mask,
        advantages=np.zeros(len(mask), dtype=np.float32),
        rollout_logprobs=np.asarray(sample.logprobs, dtype=np.float32),
    )


def _regroup(samples: Sequence[TrainSample], groups: Sequence[Group]) -> list[tuple[TrainSample, ...]]:
    remaining = iter(samples)
    return [tuple(next(remaining) for _ in group.samples) for group in groups]


def _shaped_reward(run: Run, group: Group, index: int, sample: TrainSample) -> float | None:
    """The score, less the over-long penalty and the KL where they belong to the reward."""
    score = group.verdicts[index].score
    if score is None:
        return None
    algorithm = run.config.algorithm
    reward = score + overlong_penalty(
        len(sample.response_ids), run.config.rollout.max_new_tokens, algorithm.overlong_cache or 0
    )
    if sample.ref_logprobs is not None and algorithm.kl_placement == "reward":
        reward -= kl_in_reward(
            sample.rollout_logprobs,
            sample.ref_logprobs,
            sample.loss_mask,
            algorithm.kl_estimator,
            algorithm.kl_coefficient,
            algorithm.kl_cap,
        )
    return reward


def _with_advantage(sample: TrainSample, advantage: float, valid: bool) -> TrainSample:
    if not valid:
        return replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
    return replace(sample, advantages=np.full(len(sample.loss_mask), advantage, dtype=np.float32))
