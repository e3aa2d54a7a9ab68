"""Weights into engines that hold a copy: loaded after every update, and proven to have arrived."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from paceline.telemetry.ledger import Ledger

W = TypeVar("W")


class LoadsWeights(Protocol):
    """An engine with a copy of the weights. `load_weights` compares fingerprints and raises `WeightSyncError`."""

    weight_version: int

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes weights as version `version`, or keeps its own and raises."""
        ...


class CopySync(Generic[W]):
    """Loads the trainer's weights into the engine.

    `whole` opens the whole weights (all ranks must enter), `named` lists them as the engine is to hold them. After a
    load that is to be verified, `verify` compares what the engine computes with what the trainer computes, which no
    fingerprint can: an engine may hold the right weights and use others. `num_verified` loads are verified, the first
    of a process (None: all); two, so that weights that changed are among them.
    """

    def __init__(
        self,
        engine: LoadsWeights,
        whole: Callable[[], AbstractContextManager[W]],
        named: Callable[[W], Iterable[tuple[str, Tensor]]],
        verify: Callable[[W], None],
        ledger: Ledger,
        *,
        num_verified: int | None,
    ) -> None:
        self._engine, self._whole, self._named, self._verify = engine, whole, named, verify
        self._ledger, self._num_verified, self._num_loads = ledger, num_verified, 0

    def publish(self, version: int, verify: bool = False) -> None:
        """Loads the trainer's present weights as version `version`.

        Raises:
            WeightSyncError: they did not arrive, or are not used; the engine's version stays what it was.
        """
        before = self._engine.weight_version
        with self._ledger.span("sync"), self._whole() as whole:
            with self._ledger.span("sync", "load weights", cause="communication"):
                self._engine.load_weights(self._named(whole), version)
            if verify or self._num_verified is None or self._num_loads < self._num_verified:
                try:
                    with self._ledger.span("sync", "verify log-probs"):
                        self._verify(whole)
                except BaseException:
                    self._engine.weight_version = before
                    raise
        self._num_loads += 1
