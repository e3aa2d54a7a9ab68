"""Over-sampling: more groups are begun than a step needs, and the rest is aborted once enough are complete."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.rollout.protocol import (
    OnSample,
    RolloutRequest,
    SampleEvent,
    SamplingParams,
    StreamingEngine,
)
from paceline.types import Sample


@dataclass(frozen=True, slots=True)
class EarlyStopped:
    """`complete` are the indices of the requests whose groups came first, in order of the requests, with their samples.

    `dropped` are the samples of all others, finished or aborted, with the tokens they had.
    """

    complete: tuple[int, ...]
    groups: tuple[tuple[Sample, ...], ...]
    dropped: tuple[Sample, ...]

    @property
    def num_dropped_tokens(self) -> int:
        """Tokens sampled for nothing."""
        return sum(len(sample.token_ids) for sample in self.dropped)

    @property
    def length_ratio(self) -> float:
        """Mean length of the dropped samples, as far as they came, over that of the kept ones.

        What is dropped would have become longer: above 1 means that the step leans towards short responses, by at
        least this much. 0 when nothing was dropped.
        """
        if not self.dropped:
            return 0.0
        kept = [len(sample.token_ids) for group in self.groups for sample in group]
        return (self.num_dropped_tokens / len(self.dropped)) / (sum(kept) / len(kept))


def generate_enough(
    engine: StreamingEngine,
    requests: Sequence[RolloutRequest],
    params: SamplingParams,
    num_groups: int,
    on_sample: OnSample | None = None,
) -> EarlyStopped:
    """Samples all requests until `num_groups` of them are complete; of those that complete in one round, the first
    requests count. `on_sample` is called with the samples of a group once it is known to be kept.

    Raises:
        ValueError: there are fewer requests, or one does not fit.
        RuntimeError: the engine has work of somebody else.
    """
    if not 1 <= num_groups <= len(requests):
        raise ValueError(f"{num_groups} groups wanted of {len(requests)} requests")
    if engine.has_work:
        raise RuntimeError("over-sampling needs an engine without work")
    found: list[dict[int, Sample]] = [{} for _ in requests]
    kept: list[int] = []
    numbers: dict[int, int] = {}
    try:
        for index, request in enumerate(requests):
            numbers[engine.submit(request, params)] = index
        while len(kept) < num_groups:
            for index in _completed(engine.step(), numbers, requests, found)[: num_groups - len(kept)]:
                kept.append(index)
                if on_sample is not None:
                    for sample in _in_order(found[index]):
                        on_sample(index, sample)
    finally:
        for request_id, index in numbers.items():
            _take(engine.abort(request_id), {request_id: index}, found)
    kept.sort()
    dropped = [s for index, samples in enumerate(found) if index not in kept for s in _in_order(samples)]
    return EarlyStopped(tuple(kept), tuple(tuple(_in_order(found[index])) for index in kept), tuple(dropped))


def _completed(
    events: Sequence[SampleEvent],
    numbers: Mapping[int, int],
    requests: Sequence[RolloutRequest],
    found: list[dict[int, Sample]],
) -> list[int]:
    """Requests, in order, whose last sample has just finished."""
    touched = _take(events, numbers, found)
    return sorted(index for index in touched if len(found[index]) == len(requests[index].seeds))


def _take(
    events: Sequence[SampleEvent], numbers: Mapping[int, int], found: list[dict[int, Sample]]
) -> set[int]:
    touched = set()
    for event in events:
        if event.finished is not None:
            index = numbers[event.request_id]
            found[index][event.sample_index] = event.finished
            touched.add(index)
    return touched


def _in_order(samples: Mapping[int, Sample]) -> list[Sample]:
    return [samples[index] for index in sorted(samples)]
