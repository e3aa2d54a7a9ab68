"""What a router knows of its settings, its replicas and its samples."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.rollout.protocol import RolloutRequest, SamplingParams
from paceline.rollout.remote.weight_files import BY_FILE, WeightTransfer
from paceline.rollout.replica import Replica

OpenReplica = Callable[[str, Callable[[], None]], Replica]
"""Starts a replica of a name; the second argument is called whenever it has news."""


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """See `rollout.replicas` in the config."""

    num_replicas: int
    affinity_margin: int = 8
    max_queued: int | None = None
    max_restarts: int = 2
    transfer: WeightTransfer = BY_FILE


class SampleKey(NamedTuple):
    """One sample, by the router's own request id and its index in that request."""

    request_id: int
    sample_index: int


@dataclass(slots=True)
class OpenSamples:
    """A request and the samples of it that have not ended."""

    request: RolloutRequest
    params: SamplingParams
    open: set[int]


@dataclass(slots=True)
class HeldReplica:
    """A replica, what it was given, and until when it takes nothing more (on the monotonic clock)."""

    replica: Replica
    requests: dict[int, tuple[SampleKey, ...]] = field(default_factory=dict)
    """Its own request id to the samples of that request, in its order of them; all belong to one request of ours."""
    pending: set[SampleKey] = field(default_factory=set)
    """Those that have not ended."""
    refused_until: float = 0.0


def distance(one: list[list[float]], other: list[list[float]]) -> float:
    """Sum of absolute differences of two sets of log-probs."""
    return sum(
        abs(a - b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )
