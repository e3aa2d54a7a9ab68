"""What a router, and a weight sync, ask of an engine that holds a copy of the weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.rollout.protocol import RolloutRequest, RolloutStats, SampleEvent, SamplingParams
from paceline.rollout.remote.weight_files import Offer
from paceline.sync.versions import WeightSyncError
from paceline.telemetry.flops import ModelShape, forward_flops
from paceline.types import Sample

GenerationFlops = Callable[[Sequence[RolloutRequest], Sequence[Sequence[Sample]]], float]
"""Model FLOPs of generating samples for requests."""


@dataclass(frozen=True, slots=True)
class Published:
    """A weight version and the fingerprint of exactly what was sent."""

    version: int
    fingerprint: str


class Replica(Protocol):
    """One engine behind a router. Nothing here blocks but `wait_ready` and what says so; everything may raise
    `ReplicaDiedError`."""

    name: str
    weight_version: int

    def wait_ready(self) -> None:
        """Waits until it serves."""
        ...

    @property
    def is_ready(self) -> bool:
        """Whether it serves by now, or has ended: `wait_ready` will not wait."""
        ...

    @property
    def num_open_samples(self) -> int:
        """Samples it was given and has not ended."""
        ...

    def submit(self, request: RolloutRequest, params: SamplingParams) -> int:
        """See `StreamingEngine.submit`."""
        ...

    def step(self, timeout_s: float) -> list[SampleEvent]:
        """News that has arrived, waiting at most `timeout_s`."""
        ...

    def abort(self, request_id: int) -> list[SampleEvent]:
        """See `StreamingEngine.abort`."""
        ...

    @property
    def facts(self) -> dict[str, object]:
        """What it said of itself when it was ready."""
        ...

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]] | None:
        """Log-probs at temperature 1 of prompts, their first tokens left out; None where the engine cannot say."""
        ...

    def begin_stats(self) -> None:
        """Counts from here on."""
        ...

    def end_stats(self, requests: Sequence[RolloutRequest], groups: Sequence[Sequence[Sample]]) -> None:
        """Takes the counts since `begin_stats` for those of these samples; `stats` then holds them."""
        ...

    @property
    def stats(self) -> RolloutStats:
        """Counts of the last counted work."""
        ...

    def begin_load(self, offer: Offer, published: Published) -> int:
        """Orders the load of `published`; `end_load` waits for it."""
        ...

    def end_load(self, call: int, published: Published) -> None:
        """Weights are loaded, fingerprints compared, caches dropped. Raises `WeightSyncError`."""
        ...

    def sleep(self) -> None:
        """Gives memory back."""
        ...

    def wake(self) -> None:
        """Takes it again, wholly or not at all."""
        ...

    def kill(self) -> None:
        """Ends it at once."""
        ...

    def close(self) -> None:
        """Lets it leave."""
        ...


def check_loaded(name: str, published: Published, answer: Mapping[str, Any]) -> None:
    """Compares what an engine says it holds with what was published.

    `answer` holds `received`, the fingerprint of what arrived, and `held`, a digest of the engine's own parameters
    before and after ("before", "after"), whose layout may be another than the trainer's. Engines that keep the layout
    put the fingerprint of their parameters under `fingerprint`. `received` is None where a server cannot say.

    Raises:
        WeightSyncError: they differ, or new weights left the engine's parameters as they were.
    """
    place = f"weight version {published.version}: rollout engine {name}"
    received = answer["received"]
    if received is not None and received != published.fingerprint:
        raise WeightSyncError(f"{place} received {received}, the trainer published {published.fingerprint}")
    held = answer.get("fingerprint")
    if held is not None and held != published.fingerprint:
        raise WeightSyncError(f"{place} holds {held}, the trainer published {published.fingerprint}")
    is_new = answer.get("received_before") not in (None, received)
    if is_new and answer.get("before") is not None and answer["before"] == answer["after"]:
        raise WeightSyncError(f"{place} received new weights, and its parameters did not change")


def generation_flops(shape: ModelShape) -> GenerationFlops:
    """FLOPs of a generation in which a group's prompt is computed once and every token attends to those before it."""

    def of(requests: Sequence[RolloutRequest], groups: Sequence[Sequence[Sample]]) -> float:
        segments, num_tokens = [], 0
        for request, samples in zip(requests, groups, strict=True):
            prompt = len(request.prompt.token_ids)
            segments.append((prompt, 0))
            segments += [
                (len(sample.token_ids) - 1, prompt) for sample in samples if len(sample.token_ids) > 1
            ]
            num_tokens += sum(len(sample.token_ids) for sample in samples)
        return forward_flops(shape, segments, num_tokens)

    return of
