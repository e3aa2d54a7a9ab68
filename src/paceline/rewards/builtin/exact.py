"""Reward 1 when the completion is the reference answer."""

from collections.abc import Mapping
from typing import Any

from paceline.rewards.functions import RewardFunction


def exact_match(casefold: bool = False) -> RewardFunction:
    """1.0 if completion and answer are equal without surrounding white space, else 0.0.

    `casefold=True` also ignores case. Raises `ValueError` (an error verdict) for a prompt without an answer.
    """

    def normalised(text: str) -> str:
        return text.strip().casefold() if casefold else text.strip()

    def score(completion: str, *, answer: str | None, metadata: Mapping[str, Any], prompt: str) -> float:
        if answer is None:
            raise ValueError("exact_match needs a reference answer and the prompt has none")
        return float(normalised(completion) == normalised(answer))

    return score
