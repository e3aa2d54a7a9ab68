"""A whole batch on an engine that is driven round by round: submit everything, step until nothing is left."""

from collections.abc import Sequence
from typing import Protocol

from paceline.rollout.protocol import OnSample, RolloutRequest, SampleEvent, SamplingParams
from paceline.types import Sample


class Drivable(Protocol):
    """The part of `StreamingEngine` that is needed."""

    def submit(self, request: RolloutRequest, params: SamplingParams) -> int: ...
    def step(self) -> list[SampleEvent]: ...


def generate_by_steps(
    engine: Drivable, requests: Sequence[RolloutRequest], params: SamplingParams, on_sample: OnSample | None
) -> list[tuple[Sample, ...]]:
    """See `RolloutEngine.generate`. Nothing else may be running on the engine."""
    index_of = {engine.submit(request, params): index for index, request in enumerate(requests)}
    finished: dict[tuple[int, int], Sample] = {}
    wanted = sum(len(request.seeds) for request in requests)
    while len(finished) < wanted:
        for event in engine.step():
            if event.finished is None:
                continue
            index = index_of[event.request_id]
            finished[index, event.sample_index] = event.finished
            if on_sample is not None:
                on_sample(index, event.finished)
    return [
        tuple(finished[index, sample] for sample in range(len(request.seeds)))
        for index, request in enumerate(requests)
    ]
