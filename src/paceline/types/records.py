"""Prompt, sample, verdict and group: what the stages hand to one another."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Stage = Literal[
    "data",
    "rollout",
    "tools",
    "reward",
    "old_logprob",
    "ref_logprob",
    "values",
    "advantage",
    "update_critic",
    "update_actor",
    "sync",
    "checkpoint",
    "eval",
    "idle",
]
STAGES: tuple[Stage, ...] = get_args(Stage)

Cause = Literal["compute", "memory", "communication", "scheduling", "queue", "data"]
CAUSES: tuple[Cause, ...] = get_args(Cause)

FinishReason = Literal["stop", "length", "abort"]
"""Why a sample ended: a stop token was sampled, the token limit was reached, or it was interrupted."""

Outcome = Literal["score", "timeout", "error", "aborted"]
"""What came of scoring a sample; `aborted`: nothing was scored, because the sample is not whole."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question, already rendered through the chat template.

    `prompt_id` is stable across epochs and resumes; `token_ids` includes every template token; `answer` and
    `metadata` are what the reward function sees beside the completion. `messages` are the conversation before it was
    rendered (role and content), for models that render it by a template of their own.
    """

    prompt_id: str
    token_ids: tuple[int, ...]
    text: str
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of one prompt: exactly the ids that were sampled, never re-tokenised.

    `logprobs[i]` is the natural-log probability of `token_ids[i]` under the distribution it was sampled from
    (temperature included). `loss_mask[i]` is 1 where the token is trained on. The end token, when sampled, is
    part of `token_ids`.

    `token_versions[i]` is the weight version that sampled `token_ids[i]`; empty where `weight_version` sampled all.
    Where they differ, `weight_version` is the oldest.

    `prompt_token_ids` are the tokens before `token_ids` where those are not the prompt's own: an episode that a program
    has played may have begun otherwise. Empty where they are the prompt's.
    """

    prompt_id: str
    sample_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    finish_reason: FinishReason
    weight_version: int
    seed: int
    text: str
    token_versions: tuple[int, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.loss_mask):
            raise ValueError(
                f"sample {self.prompt_id}#{self.sample_index}: {len(self.token_ids)} tokens, "
                f"{len(self.logprobs)} log-probs and {len(self.loss_mask)} mask entries must be equally many"
            )
        if self.token_versions and len(self.token_versions) != len(self.token_ids):
            raise ValueError(
                f"sample {self.prompt_id}#{self.sample_index}: {len(self.token_versions)} versions for "
                f"{len(self.token_ids)} tokens"
            )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a reward function said of one sample. Anything but a score carries none.

    `parts` are the verdicts of the reward's sources by name, where it has several.
    """

    outcome: Outcome
    score: float | None
    seconds: float
    message: str = ""
    parts: Mapping[str, "Verdict"] | None = None

    def __post_init__(self) -> None:
        if (self.outcome == "score") != (self.score is not None):
            raise ValueError(f"a verdict carries a score exactly when its outcome is 'score': {self}")


@dataclass(frozen=True, slots=True)
class Group:
    """All samples of one prompt, with one verdict per sample in the same order."""

    prompt: Prompt
    samples: tuple[Sample, ...]
    verdicts: tuple[Verdict, ...]

    def __post_init__(self) -> None:
        if len(self.samples) != len(self.verdicts):
            raise ValueError(
                f"group {self.prompt.prompt_id}: {len(self.samples)} samples, {len(self.verdicts)} verdicts"
            )
