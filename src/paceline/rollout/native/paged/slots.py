"""Running samples as arrays, one row (slot) each, so that a round's bookkeeping is a few array operations.

Shapes: S slots, P pages of the longest sample, T tokens of the longest response.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from paceline.rollout.protocol import RolloutRequest, SamplingParams
from paceline.types import FinishReason, Sample

IntArray = npt.NDArray[np.int64]


@dataclass(slots=True)
class ActiveRequest:
    """A request that has unfinished samples. Of two, the one with the smaller id came first."""

    request_id: int
    request: RolloutRequest
    params: SamplingParams
    unfinished: set[int]


@dataclass(slots=True)
class Progress:
    """What a sample has produced so far, outside of a slot."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    masks: list[int] = field(default_factory=list)

    @classmethod
    def of_sample(cls, sample: Sample) -> "Progress":
        """An aborted sample, to go on from."""
        versions = sample.token_versions or (sample.weight_version,) * len(sample.token_ids)
        return cls(list(sample.token_ids), list(sample.logprobs), list(versions), list(sample.loss_mask))


@dataclass(slots=True)
class Occupant:
    """The sample in a slot and the pages it refers to, in order of its tokens. `masks` are the loss mask's first
    entries; all later ones are 1."""

    active: ActiveRequest
    sample_index: int
    pages: list[int]
    masks: list[int]

    @property
    def order(self) -> tuple[int, int]:
        """Who came first; preemption takes the last."""
        return self.active.request_id, self.sample_index


@dataclass(frozen=True, slots=True)
class Ended:
    """A sample that has ended, with all it produced."""

    active: ActiveRequest
    sample_index: int
    progress: Progress
    reason: FinishReason


class SlotTable:
    """S rows. `lengths`: tokens whose keys and values are (or will be, once what is launched has run) in the cache;
    `counts`: tokens drawn, launched ones included; `serials`: changes whenever a slot's occupant does."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.occupants: list[Occupant | None] = [None] * num_slots
        self.lengths, self.counts, self.limits, self.serials = np.zeros((4, num_slots), dtype=np.int64)
        self.seeds = np.zeros(num_slots, dtype=np.uint64)
        self.temperatures = np.ones(num_slots, dtype=np.float64)
        self.ignores_stop = np.zeros(num_slots, dtype=bool)
        self.is_running = np.zeros(num_slots, dtype=bool)
        self.may_share = np.zeros(num_slots, dtype=bool)
        self.page_table = np.zeros((num_slots, 8), dtype=np.int32)
        self.tokens = np.zeros((num_slots, 64), dtype=np.int64)
        self.logprobs = np.zeros((num_slots, 64), dtype=np.float32)
        self.versions = np.zeros((num_slots, 64), dtype=np.int64)
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots without an occupant."""
        return len(self._free)

    def occupant(self, slot: int) -> Occupant:
        """The sample in a slot that is not empty."""
        found = self.occupants[slot]
        assert found is not None, f"slot {slot} is empty"
        return found

    def reserve(self, count: int) -> list[int]:
        """Takes free slots; their rows are filled by `start`."""
        return [self._free.pop() for _ in range(count)]

    def give_back(self, slots: list[int]) -> None:
        """Slots that were reserved and never started."""
        self._free += slots

    def start(self, slot: int, occupant: Occupant, progress: Progress, length: int) -> None:
        """A sample begins to run; `length` tokens of it are in the cache."""
        request, params = occupant.active.request, occupant.active.params
        limit, count = request.max_new_tokens, len(progress.tokens)
        self.occupants[slot] = occupant
        self.serials[slot] += 1
        self.lengths[slot], self.counts[slot], self.limits[slot] = length, count, limit
        self.seeds[slot] = np.uint64(request.seeds[occupant.sample_index] & 0xFFFFFFFFFFFFFFFF)
        self.temperatures[slot] = params.temperature
        self.ignores_stop[slot] = params.ignore_stop
        self.is_running[slot] = self.may_share[slot] = True
        self._make_room(limit)
        self.tokens[slot, :count] = progress.tokens
        self.logprobs[slot, :count] = progress.logprobs
        self.versions[slot, :count] = progress.versions
        self.set_pages(slot, 0, occupant.pages)

    def set_pages(self, slot: int, start: int, pages: list[int]) -> None:
        """The row of the page table from entry `start`."""
        end = start + len(pages)
        if end > self.page_table.shape[1]:
            wider = np.zeros((self.num_slots, max(end, 2 * self.page_table.shape[1])), dtype=np.int32)
            wider[:, : self.page_table.shape[1]] = self.page_table
            self.page_table = wider
        self.page_table[slot, start:end] = pages

    def progress(self, slot: int, count: int) -> Progress:
        """The first `count` tokens of the sample in a slot."""
        occupant = self.occupant(slot)
        return Progress(
            self.tokens[slot, :count].tolist(),
            self.logprobs[slot, :count].tolist(),
            self.versions[slot, :count].tolist(),
            occupant.masks + [1] * (count - len(occupant.masks)),
        )

    def leave(self, slot: int) -> Occupant:
        """Empties a slot."""
        occupant = self.occupant(slot)
        self.occupants[slot] = None
        self.is_running[slot] = False
        self.serials[slot] += 1
        self._free.append(slot)
        return occupant

    def _make_room(self, num_tokens: int) -> None:
        have = self.tokens.shape[1]
        if num_tokens > have:
            more = ((0, 0), (0, num_tokens - have))
            self.tokens, self.logprobs = np.pad(self.tokens, more), np.pad(self.logprobs, more)
            self.versions = np.pad(self.versions, more)


def ended_already(prefix: Sample, request: RolloutRequest, params: SamplingParams) -> FinishReason | None:
    """Why a sample that goes on from `prefix` has nothing left to do, None where it has."""
    if prefix.token_ids and prefix.token_ids[-1] in params.stop_token_ids and not params.ignore_stop:
        return "stop"
    return "length" if len(prefix.token_ids) >= request.max_new_tokens else None
