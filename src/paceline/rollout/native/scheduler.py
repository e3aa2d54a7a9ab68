"""Who runs in which slot: groups wait, are admitted whole when their slots are free, and leave sample by sample."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.rollout.protocol import RolloutRequest, SamplingParams
from paceline.types import FinishReason, Sample


@dataclass(slots=True)
class RunningSample:
    """A sample in a slot. `next_position` is where its newest token's keys and values will be written; `versions` are
    the weight versions of `tokens`, `masks` their loss mask."""

    request_id: int
    sample_index: int
    seed: int
    max_new_tokens: int
    next_position: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)

    def append(
        self, token: int, logprob: float, params: SamplingParams, version: int = 0
    ) -> FinishReason | None:
        """Adds a sampled token and says whether the sample is finished."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.masks.append(1)
        if token in params.stop_token_ids and not params.ignore_stop:
            return "stop"
        return "length" if len(self.tokens) >= self.max_new_tokens else None


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as the engine took it. `capacity` is what one of its samples needs of a slot, in tokens."""

    request_id: int
    request: RolloutRequest
    params: SamplingParams
    capacity: int

    def prefix(self, sample_index: int) -> Sample | None:
        """What sample `sample_index` goes on from."""
        return self.request.prefixes[sample_index] if self.request.prefixes else None


def start_sample(submission: Submission, index: int) -> RunningSample:
    """Sample `index` of a request before its next token, with what it goes on from."""
    request, prefix = submission.request, submission.prefix(index)
    sample = RunningSample(
        submission.request_id,
        index,
        request.seeds[index],
        request.max_new_tokens,
        len(request.prompt.token_ids),
    )
    if prefix is not None:
        sample.tokens += prefix.token_ids
        sample.logprobs += prefix.logprobs
        sample.versions += prefix.token_versions or (prefix.weight_version,) * len(prefix.token_ids)
        sample.masks += prefix.loss_mask
        sample.next_position += len(prefix.token_ids)
    return sample


@dataclass(frozen=True, slots=True)
class Admission:
    """Samples of one request that start together; they share one prefill of their prompt."""

    submission: Submission
    sample_indices: tuple[int, ...]


class Scheduler:
    """First come, first served.

    A group larger than all slots is cut into parts of at most that many samples, each with its own prefill.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Submission, tuple[int, ...]]] = deque()

    def add(self, submission: Submission, sample_indices: tuple[int, ...]) -> None:
        """Puts samples of a request at the end of the queue."""
        if sample_indices:
            self._waiting.append((submission, sample_indices))

    def admit(self, num_running: int, num_slots: int, capacity: int) -> list[Admission]:
        """Takes waiting parts, in order, while their samples fit beside `num_running` others in `num_slots` slots of
        `capacity` tokens."""
        admitted: list[Admission] = []
        free = num_slots - num_running
        while self._waiting:
            submission, indices = self._waiting[0]
            part = indices[:num_slots]
            if len(part) > free or submission.capacity > capacity:
                break
            self._waiting.popleft()
            if rest := indices[num_slots:]:
                self._waiting.appendleft((submission, rest))
            free -= len(part)
            admitted.append(Admission(submission, part))
        return admitted

    def put_back(self, admissions: list[Admission]) -> None:
        """Returns admissions that did not start to the head of the queue."""
        self._waiting.extendleft((a.submission, a.sample_indices) for a in reversed(admissions))

    def remove(self, request_id: int) -> None:
        """Takes the waiting samples of a request out."""
        self._waiting = deque(entry for entry in self._waiting if entry[0].request_id != request_id)

    def waiting(self) -> Iterator[tuple[Submission, int]]:
        """Waiting requests, each with the number of its samples that wait."""
        return ((submission, len(indices)) for submission, indices in self._waiting)

    @property
    def has_waiting(self) -> bool:
        """Whether any sample has not been admitted yet."""
        return bool(self._waiting)
