"""What a router knows of its settings, its replicas and its samples."""

from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Waiting:
    """One sample that no replica has."""

    request_id: int
    index: int


@dataclass(slots=True)
class OpenSamples:
    """A request and the samples of it that have not ended."""

    request: RolloutRequest
    params: SamplingParams
    open: set[int]


@dataclass(slots=True)
class HeldReplica:
    """A replica with the requests it was given: its own request id to ours, and its sample indices to ours."""

    replica: Replica
    requests: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)
    pending: set[tuple[int, int]] = field(default_factory=set)
    refused_until: float = 0.0


def distance(one: list[list[float]], other: list[list[float]]) -> float:
    """Sum of absolute differences of two sets of log-probs."""
    return sum(
        abs(a - b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )
