"""What the data layer, the schedules and the reward workers agree on: what to score, and by which function."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.types.records import Verdict

LARGEST_SCORE = 3.4028234e38
"""A score's magnitude is at most this: advantages and returns are float32, and their squares must be numbers too."""


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """Names a reward function so that another process can find it: a built-in name or `module:function`.

    `params` are keyword arguments of the built-in's factory (rewards/functions.py); a user's function takes none.
    """

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardJob:
    """One completion to score. `metadata` crosses a process boundary by pickle.

    `messages` are the prompt as a conversation, for those who render it by a template of their own; rules do not get
    them.
    """

    prompt: str
    completion: str
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] = ()


class Scorer(Protocol):
    """Anything that turns jobs into verdicts in the same order; `rewards.RewardPool` is one."""

    def score(self, jobs: Sequence[RewardJob]) -> list[Verdict]:
        """One verdict per job, in order."""
        ...
