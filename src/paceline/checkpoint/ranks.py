"""What checkpoints need of the other ranks: to agree before anything is written, and to learn what rank 0 found."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from paceline.checkpoint.errors import CheckpointError

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks of a run; `engine.mesh.RankMesh` is one. Every method is a call that all ranks make together."""

    @property
    def rank(self) -> int:
        """This process's number."""
        ...

    @property
    def world_size(self) -> int:
        """How many there are."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Everybody's value, in order of ranks."""
        ...


class Alone:
    """One process."""

    rank = 0
    world_size = 1

    def gather_objects(self, value: Any) -> list[Any]:
        """Its own value."""
        return [value]


def raise_together(ranks: Ranks, error: Exception | None) -> None:
    """Raises on every rank when one of them brings an error: its own, or what another rank said.

    A rank that went on alone would wait for the failed one until the time limit.
    """
    found = ranks.gather_objects(None if error is None else (type(error), str(error)))
    if error is not None:
        raise error
    for rank, theirs in enumerate(found):
        if theirs is not None:
            kind, text = theirs
            known = kind if issubclass(kind, CheckpointError) else CheckpointError
            raise known(f"rank {rank}: {text}")


def from_rank_zero(ranks: Ranks, function: Callable[[], T]) -> T:
    """What `function` returns on rank 0, for all ranks; what it raises there is raised on all."""
    value: T | None = None
    error: Exception | None = None
    if ranks.rank == 0:
        try:
            value = function()
        except Exception as raised:  # whatever it is, the others are waiting for it; raised on below
            if ranks.world_size == 1:
                raise
            error = raised
    outcome: tuple[T, Exception | None] = ranks.gather_objects((value, error))[0]
    if outcome[1] is not None:
        raise outcome[1] if error is None else error
    return outcome[0]
