"""Weight versions when the trainer's weights are sharded over ranks, and gathered for each rollout."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from paceline.sync.fingerprint import fingerprint
from paceline.sync.versions import Versioned, WeightSyncError
from paceline.telemetry.ledger import Ledger

Gathered = Callable[[], AbstractContextManager[Iterable[tuple[str, Tensor]]]]
"""Opens the whole weights, named, on every rank; all ranks must enter."""


class GatheredSync:
    """Advances the engine's weight version after an update; every rank must call it.

    Each rank gathers the weights by itself when it generates. That all of them get the same bits is compared after the
    first update of a process, and whenever it is asked for: reading all weights takes about a second per GB.
    """

    def __init__(
        self,
        engine: Versioned,
        gathered: Gathered,
        gather_objects: Callable[[Any], list[Any]],
        ledger: Ledger,
    ) -> None:
        self._engine, self._gathered = engine, gathered
        self._gather_objects, self._ledger = gather_objects, ledger
        self._is_verified = False

    def publish(self, version: int, verify: bool = False) -> None:
        """Makes the current weights version `version` for the engine.

        Raises:
            WeightSyncError: ranks gather different weights; the engine keeps its old version.
        """
        with self._ledger.span("sync"):
            if verify or not self._is_verified:
                self._compare(version)
                self._is_verified = True
            self._engine.weight_version = version

    def _compare(self, version: int) -> None:
        with self._gathered() as parameters:
            held: list[str] = self._gather_objects(fingerprint(parameters))
        for rank, theirs in enumerate(held):
            if theirs != held[0]:
                raise WeightSyncError(
                    f"weight version {version}: rank {rank} gathers {theirs}, rank 0 gathers {held[0]}"
                )
