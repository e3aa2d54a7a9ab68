"""Over-sampling: more groups are begun than a step needs, and the rest is aborted once enough are complete."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.rollout.protocol import OnSample, RolloutRequest, SamplingParams, StreamingEngine
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
    requests count. `on_sample` is called with finished samples, some of which may be dropped later.

    Raises:
        ValueError: there are fewer requests, or one does not fit.
        RuntimeError: the engine has work of somebody else.
    """
    if not 1 <= num_groups <= len(requests):
        raise ValueError(f"{num_groups} groups wanted of {len(requests)} requests")
    if engine.has_work:
        raise RuntimeError("over-sampling needs an engine without work")
    found: list[dict[int, Sample]] = [{} for _ in requests]
    numbers: dict[int, int] = {}
    try:
        for index, request in enumerate(requests):
            numbers[engine.submit(request, params)] = index
        while _num_complete(requests, found) < num_groups:
            for event in engine.step():
                if event.finished is not None:
                    index = numbers[event.request_id]
                    found[index][event.sample_index] = event.finished
                    if on_sample is not None:
                        on_sample(index, event.finished)
    finally:
        for request_id, index in numbers.items():
            for event in engine.abort(request_id):
                if event.finished is not None:
                    found[index].setdefault(event.sample_index, event.finished)
    return _split(requests, found, num_groups)


def _is_complete(request: RolloutRequest, samples: dict[int, Sample]) -> bool:
    return len(samples) == len(request.seeds) and all(s.finish_reason != "abort" for s in samples.values())


def _num_complete(requests: Sequence[RolloutRequest], found: Sequence[dict[int, Sample]]) -> int:
    return sum(_is_complete(request, samples) for request, samples in zip(requests, found, strict=True))


def _split(
    requests: Sequence[RolloutRequest], found: Sequence[dict[int, Sample]], num_groups: int
) -> EarlyStopped:
    complete = [index for index, request in enumerate(requests) if _is_complete(request, found[index])]
    kept = complete[:num_groups]
    groups = [tuple(found[index][sample] for sample in sorted(found[index])) for index in kept]
    dropped = [
        found[index][sample]
        for index in range(len(requests))
        if index not in kept
        for sample in sorted(found[index])
    ]
    return EarlyStopped(tuple(kept), tuple(groups), tuple(dropped))
