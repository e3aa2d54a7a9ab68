"""What every rollout engine offers to the schedules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.types import Prompt, Sample


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One group to sample: `seeds[i]` is the seed of sample `i`, so its length is the group size."""

    prompt: Prompt
    seeds: tuple[int, ...]
    max_new_tokens: int

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or not self.seeds:
            raise ValueError(
                f"request for {self.prompt.prompt_id}: {len(self.seeds)} samples of {self.max_new_tokens} tokens"
            )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Distribution to sample from. Temperature 0 is greedy and reports log-probs at temperature 1."""

    temperature: float
    stop_token_ids: frozenset[int]
    ignore_stop: bool = False


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Counts of one `generate` call. Tokens are those computed or produced, not those padded."""

    num_prompt_tokens: int = 0
    num_prefill_tokens: int = 0
    num_generated_tokens: int = 0
    num_decode_steps: int = 0
    num_slot_steps: int = 0
    num_slots: int = 0
    cache_bytes: int = 0
    flops: float = 0.0

    @property
    def mean_running(self) -> float:
        """Samples decoded together, on average over decode steps."""
        return self.num_slot_steps / self.num_decode_steps if self.num_decode_steps else 0.0


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
