"""What rounds added to samples, until it is handed over."""

from dataclasses import dataclass, field

from paceline.rollout.native.scheduler import RunningSample
from paceline.rollout.protocol import SampleEvent
from paceline.types import FinishReason, Sample


@dataclass(slots=True)
class _Added:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: Sample | None = None


class RoundEvents:
    """Tokens and finished samples by request and sample, in the order in which they first appeared."""

    def __init__(self) -> None:
        self._added: dict[tuple[int, int], _Added] = {}

    def __bool__(self) -> bool:
        return bool(self._added)

    def add(self, request_id: int, sample_index: int, token: int, logprob: float) -> None:
        """Notes a sampled token."""
        added = self._added.setdefault((request_id, sample_index), _Added())
        added.token_ids.append(token)
        added.logprobs.append(logprob)

    def finish(self, request_id: int, sample_index: int, sample: Sample) -> None:
        """Notes that a sample has ended."""
        self._added.setdefault((request_id, sample_index), _Added()).finished = sample

    def take(self, request_id: int | None = None) -> list[SampleEvent]:
        """Hands over what is noted, of one request or (None) of all, and forgets it."""
        keys = [key for key in self._added if request_id is None or key[0] == request_id]
        taken = [(key, self._added.pop(key)) for key in keys]
        return [
            SampleEvent(*key, tuple(added.token_ids), tuple(added.logprobs), added.finished)
            for key, added in taken
        ]


def finished_sample(
    running: RunningSample, prompt_id: str, reason: FinishReason, version: int, text: str
) -> Sample:
    """The record of a sample that has ended; `version` is the weights' where it has no token."""
    versions = set(running.versions) or {version}
    return Sample(
        prompt_id=prompt_id,
        sample_index=running.sample_index,
        token_ids=tuple(running.tokens),
        logprobs=tuple(running.logprobs),
        loss_mask=tuple(running.masks),
        finish_reason=reason,
        weight_version=min(versions),
        seed=running.seed,
        text=text,
        token_versions=tuple(running.versions) if len(versions) > 1 else (),
    )
