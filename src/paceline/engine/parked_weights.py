"""Weights of a model that is only read, on the host except while it is read."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from paceline.engine.host_storage import HostStorage
from paceline.engine.shards import local_part


class ParkedWeights:
    """Moves a module's parameters (this rank's shards of them) to the host at once and back for each use.

    They are copied out once: nobody changes them. Buffers stay, which are small.
    """

    def __init__(self, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())
        if any(parameter.requires_grad for parameter in parameters.values()):
            raise ValueError("weights that are trained cannot be parked: the optimiser holds them")
        for parameter in parameters.values():
            if not local_part(parameter).untyped_storage().resizable():  # a file mapped into a CPU's memory
                parameter.data = parameter.data.clone()
        self._parts = {name: local_part(parameter.detach()) for name, parameter in parameters.items()}
        self._store = HostStorage(next(iter(self._parts.values())).device)
        self._store.put_away(self._parts)

    @property
    def num_bytes(self) -> int:
        """Bytes on the host."""
        return self._store.num_bytes

    @contextmanager
    def here(self) -> Iterator[None]:
        """The weights are where they belong inside the context."""
        self._store.fetch_now(self._parts)
        try:
            yield
        finally:
            self._store.put_away(self._parts, unchanged=True)
