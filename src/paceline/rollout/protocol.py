"""What every rollout engine offers: whole batches to the schedules, single rounds to routers and servers."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from operator import add, attrgetter
from typing import Protocol

from torch import Tensor

from paceline.types import Prompt, Sample


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One group to sample: `seeds[i]` is the seed of sample `i`, so its length is the group size.

    `prefixes[i]`, where not None, is an aborted sample that sample `i` goes on from: its tokens count towards
    `max_new_tokens` and keep their log-probs and versions. Empty: every sample begins at the prompt.
    """

    prompt: Prompt
    seeds: tuple[int, ...]
    max_new_tokens: int
    prefixes: tuple[Sample | None, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or not self.seeds:
            raise ValueError(
                f"request for {self.prompt.prompt_id}: {len(self.seeds)} samples of {self.max_new_tokens} tokens"
            )
        if self.prefixes and len(self.prefixes) != len(self.seeds):
            raise ValueError(
                f"request for {self.prompt.prompt_id}: {len(self.prefixes)} prefixes for {len(self.seeds)} samples"
            )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Distribution to sample from. Temperature 0 is greedy and reports log-probs at temperature 1."""

    temperature: float
    stop_token_ids: frozenset[int]
    ignore_stop: bool = False


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Counts of one `generate` call. Tokens are those computed or produced, not those padded.

    `num_cached_tokens` are prompt tokens that a prefix cache held; `num_redone_samples` began again because the replica
    that had begun them died; `num_refusals` times a replica could take none, and they waited for it or went elsewhere.
    """

    num_prompt_tokens: int = 0
    num_prefill_tokens: int = 0
    num_generated_tokens: int = 0
    num_decode_steps: int = 0
    num_slot_steps: int = 0
    num_slots: int = 0
    cache_bytes: int = 0
    num_preemptions: int = 0
    num_preempted_tokens: int = 0
    flops: float = 0.0
    num_cached_tokens: int = 0
    num_redone_samples: int = 0
    num_dead_replicas: int = 0
    num_refusals: int = 0
    num_drafted_tokens: int = 0
    num_accepted_drafts: int = 0

    def __add__(self, other: "RolloutStats") -> "RolloutStats":
        return RolloutStats(*map(add, _counts_of(self), _counts_of(other)))

    @property
    def mean_running(self) -> float:
        """Samples decoded together, on average over decode steps."""
        return self.num_slot_steps / self.num_decode_steps if self.num_decode_steps else 0.0


_counts_of = attrgetter(*(field.name for field in fields(RolloutStats)))

OnSample = Callable[[int, Sample], None]
"""Called with the request's index and the sample, as soon as the sample is finished."""


class RolloutEngine(Protocol):
    """Generates groups of samples from the weights of `weight_version`."""

    weight_version: int

    def generate(
        self, requests: Sequence[RolloutRequest], params: SamplingParams, on_sample: OnSample | None = None
    ) -> list[tuple[Sample, ...]]:
        """One tuple of samples per request, in order of the requests and of their seeds."""
        ...

    def sleep(self) -> None:
        """Gives the KV cache's memory back; the next `generate` takes it again."""
        ...

    @property
    def stats(self) -> RolloutStats:
        """Counts of the last `generate`."""
        ...


@dataclass(frozen=True, slots=True)
class SampleEvent:
    """What one round added to one sample; `finished` is the whole sample once it has ended (aborted ones included)."""

    request_id: int
    sample_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: Sample | None = None


class StreamingEngine(Protocol):
    """An engine that is driven round by round, by one thread; requests may come and go between rounds.

    `generate` of a native engine is: submit everything, step until nothing is left.
    """

    weight_version: int

    def submit(self, request: RolloutRequest, params: SamplingParams) -> int:
        """Takes a request and returns its id at once. Raises `ValueError` where it can never fit."""
        ...

    def step(self) -> list[SampleEvent]:
        """One scheduling round: admissions, at most one prefill row, one token for every running sample."""
        ...

    def abort(self, request_id: int) -> list[SampleEvent]:
        """Ends a request's unfinished samples with finish reason "abort", tokens kept, and frees their memory."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes new weights (an engine on the trainer's own parameters gets none, and takes the version). Caches
        that hold values of the old weights are dropped, unless running samples go on from them, as the engine's
        documentation says; `version` tags every token sampled from now on."""
        ...
