"""Weight versions when trainer and engine share their parameters: nothing moves, but the version still counts."""

from collections.abc import Callable, Iterable
from typing import Protocol

from torch import Tensor

from paceline.sync.fingerprint import fingerprint
from paceline.telemetry.ledger import Ledger

Parameters = Callable[[], Iterable[tuple[str, Tensor]]]


class WeightSyncError(RuntimeError):
    """The engine does not hold the weights that were published; the version was not advanced."""


class Versioned(Protocol):
    """Whatever tags its samples with a weight version."""

    weight_version: int


class InProcessSync:
    """Advances the engine's weight version after an update.

    With `verify`, both sides' fingerprints are compared first; without, sharing the parameters is the proof.
    """

    def __init__(
        self, engine: Versioned, trainer_parameters: Parameters, engine_parameters: Parameters, ledger: Ledger
    ) -> None:
        self._engine, self._ledger = engine, ledger
        self._trainer_parameters, self._engine_parameters = trainer_parameters, engine_parameters

    def publish(self, version: int, verify: bool = False) -> None:
        """Makes the current weights version `version` for the engine.

        Raises:
            WeightSyncError: the fingerprints differ; the engine keeps its old version.
        """
        with self._ledger.span("sync"):
            if verify:
                published = fingerprint(self._trainer_parameters())
                held = fingerprint(self._engine_parameters())
                if published != held:
                    raise WeightSyncError(
                        f"weight version {version}: the engine holds {held}, the trainer published {published}"
                    )
            self._engine.weight_version = version
