"""The samples that have not ended: the requests they belong to, and the one queue of those that no replica has."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.rollout.protocol import RolloutRequest, SamplingParams


class SampleKey(NamedTuple):
    """One sample, by the router's own request id and its index in that request."""

    request_id: int
    sample_index: int


@dataclass(slots=True)
class OpenRequest:
    """A request and the samples of it that have not ended."""

    request: RolloutRequest
    params: SamplingParams
    open: set[int]

    def part(self, samples: Sequence[SampleKey]) -> RolloutRequest:
        """The request for some of its samples only."""
        request, indices = self.request, [sample.sample_index for sample in samples]
        return replace(
            request,
            seeds=tuple(request.seeds[index] for index in indices),
            prefixes=tuple(request.prefixes[index] for index in indices) if request.prefixes else (),
        )


class SampleQueue:
    """Samples from `add` until `end`; those in between that no replica has wait in order."""

    def __init__(self) -> None:
        self._open: dict[int, OpenRequest] = {}
        self._waiting: deque[SampleKey] = deque()
        self._next_id = 0

    def __bool__(self) -> bool:
        """Whether any sample has not ended, waiting or not."""
        return bool(self._open)

    @property
    def num_waiting(self) -> int:
        """Samples that no replica has."""
        return len(self._waiting)

    def add(self, request: RolloutRequest, params: SamplingParams) -> int:
        """Puts a request's samples at the end of the queue; returns the request's id."""
        request_id, self._next_id = self._next_id, self._next_id + 1
        indices = range(len(request.seeds))
        self._open[request_id] = OpenRequest(request, params, set(indices))
        self._waiting.extend(SampleKey(request_id, index) for index in indices)
        return request_id

    def request(self, request_id: int) -> OpenRequest | None:
        """A request of which samples are open."""
        return self._open.get(request_id)

    def is_open(self, sample: SampleKey) -> bool:
        """Whether the sample has not ended."""
        opened = self._open.get(sample.request_id)
        return opened is not None and sample.sample_index in opened.open

    @property
    def head(self) -> OpenRequest | None:
        """The request of the sample that is next."""
        return self._open[self._waiting[0].request_id] if self._waiting else None

    def pop(self) -> SampleKey:
        """Takes the sample that is next."""
        return self._waiting.popleft()

    def put_back(self, samples: Sequence[SampleKey]) -> None:
        """Samples that a replica had and did not finish, in front of all others; those that have ended are left out."""
        self._waiting.extendleft(sample for sample in reversed(samples) if self.is_open(sample))

    def withdraw(self, request_id: int) -> list[int]:
        """Ends a request's samples that no replica has; returns their indices."""
        found = [sample for sample in self._waiting if sample.request_id == request_id]
        self._waiting = deque(sample for sample in self._waiting if sample.request_id != request_id)
        for sample in found:
            self.end(sample)
        return [sample.sample_index for sample in found]

    def end(self, sample: SampleKey) -> None:
        """The sample has ended; with its last one a request is forgotten."""
        opened = self._open[sample.request_id]
        opened.open.discard(sample.sample_index)
        if not opened.open:
            del self._open[sample.request_id]
