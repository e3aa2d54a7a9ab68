"""What a router is opened with."""

from collections.abc import Callable
from dataclasses import dataclass

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
    refusal_limit_s: float = 600.0
    transfer: WeightTransfer = BY_FILE
