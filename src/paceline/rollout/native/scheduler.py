"""Who runs in which slot: groups wait, are admitted whole when their slots are free, and leave sample by sample."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.rollout.protocol import RolloutRequest, SamplingParams
from paceline.types import FinishReason


@dataclass(slots=True)
class RunningSample:
    """A sample in a slot. `next_position` is where its newest token's keys and values will be written."""

    request_index: int
    sample_index: int
    seed: int
    max_new_tokens: int
    next_position: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def append(self, token: int, logprob: float, params: SamplingParams) -> FinishReason | None:
        """Adds a sampled token and says whether the sample is finished."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in params.stop_token_ids and not params.ignore_stop:
            return "stop"
        return "length" if len(self.tokens) >= self.max_new_tokens else None


@dataclass(frozen=True, slots=True)
class Admission:
    """Samples of one request that start together; they share one prefill of their prompt."""

    request_index: int
    sample_indices: tuple[int, ...]


class Scheduler:
    """First come, first served over `num_slots` slots.

    A group larger than all slots is cut into parts of at most `num_slots` samples, each with its own prefill.
    """

    def __init__(self, requests: Sequence[RolloutRequest], num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError("the scheduler needs at least one slot")
        self._num_slots = num_slots
        self._waiting: deque[Admission] = deque()
        for index, request in enumerate(requests):
            samples = range(len(request.seeds))
            for start in range(0, len(samples), num_slots):
                self._waiting.append(Admission(index, tuple(samples[start : start + num_slots])))

    def admit(self, num_running: int) -> list[Admission]:
        """Takes waiting parts, in order, while their samples fit beside `num_running` others."""
        admitted: list[Admission] = []
        free = self._num_slots - num_running
        while self._waiting and len(self._waiting[0].sample_indices) <= free:
            admission = self._waiting.popleft()
            free -= len(admission.sample_indices)
            admitted.append(admission)
        return admitted

    @property
    def has_waiting(self) -> bool:
        """Whether any part has not been admitted yet."""
        return bool(self._waiting)
