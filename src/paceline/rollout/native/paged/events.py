"""What rounds added to samples, until it is handed over."""

from dataclasses import dataclass, field

from paceline.rollout.protocol import SampleEvent
from paceline.types import Sample


@dataclass(slots=True)
class _Added:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finished: Sample | None = None


class Inbox:
    """Tokens and finished samples by request and sample, in the order in which they first appeared. `keeps_tokens` is
    off while a whole batch is generated: nobody looks at single tokens then."""

    def __init__(self) -> None:
        self.keeps_tokens = True
        self._added: dict[tuple[int, int], _Added] = {}

    def __bool__(self) -> bool:
        return bool(self._added)

    def add(self, request_id: int, sample_index: int, token: int, logprob: float) -> None:
        """Notes a sampled token."""
        added = self._added.setdefault((request_id, sample_index), _Added())
        added.token_ids.append(token)
        added.logprobs.append(logprob)

    def finish(self, request_id: int, sample: Sample) -> None:
        """Notes that a sample has ended."""
        self._added.setdefault((request_id, sample.sample_index), _Added()).finished = sample

    def take(self, request_id: int | None = None) -> list[SampleEvent]:
        """Hands over what is noted, of one request or (None) of all, and forgets it."""
        keys = [key for key in self._added if request_id is None or key[0] == request_id]
        taken = [(key, self._added.pop(key)) for key in keys]
        return [
            SampleEvent(*key, tuple(added.token_ids), tuple(added.logprobs), added.finished)
            for key, added in taken
        ]

    def take_finished(self) -> list[tuple[int, Sample]]:
        """Finished samples with their request's id; everything noted is forgotten."""
        taken, self._added = self._added, {}
        return [(key[0], added.finished) for key, added in taken.items() if added.finished is not None]
