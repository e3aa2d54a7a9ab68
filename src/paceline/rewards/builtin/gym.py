"""Scores by the scorer that a reasoning-gym task brings along."""

from collections.abc import Mapping
from typing import Any

from paceline.config.errors import ConfigError
from paceline.config.task_library import import_reasoning_gym
from paceline.rewards.functions import KEY, RewardFunction


def reasoning_gym(dataset: str | None = None, params: Mapping[str, Any] | None = None) -> RewardFunction:
    """The task's own score, in [0, 1] for nearly all tasks.

    `dataset` is the task's name and `params` its parameters, because some scorers read them. The entry that was
    generated is `metadata["entry"]`. Some scorers mark surrounding white space down, which says nothing about the
    answer: the score is the better of the completion as it is and without it.
    """
    if dataset is None:
        raise ConfigError(KEY, "reasoning_gym", "scores only tasks given by task.name", "exact_match")
    gym = import_reasoning_gym(KEY, "reasoning_gym")
    score_answer = gym.create_dataset(dataset, size=1, seed=0, **(params or {})).score_answer

    def score(completion: str, *, answer: str | None, metadata: Mapping[str, Any], prompt: str) -> float:
        entry = metadata["entry"]
        best = score_answer(completion, entry)
        stripped = completion.strip()
        return best if best >= 1.0 or stripped == completion else max(best, score_answer(stripped, entry))

    return score


def reasoning_gym_strict(
    dataset: str | None = None, params: Mapping[str, Any] | None = None
) -> RewardFunction:
    """1.0 where the task's own score is at least 1.0, else 0.0: no part marks."""
    partial = reasoning_gym(dataset, params)

    def score(completion: str, *, answer: str | None, metadata: Mapping[str, Any], prompt: str) -> float:
        return float(partial(completion, answer=answer, metadata=metadata, prompt=prompt) >= 1.0)

    return score
