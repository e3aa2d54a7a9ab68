"""Counts what autograd really keeps, storage by storage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils import checkpoint


@dataclass
class Kept:
    """Storages kept by autograd, parameters left out."""

    storages: dict[int, Tensor] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.storages.values())


@contextmanager
def counting(module: nn.Module) -> Iterator[Kept]:
    """Whatever is saved for a backward pass inside the block; held, so that no address is given out twice."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept = Kept()

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in parameters:
            kept.storages[address] = tensor.detach()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def cached_by_selection() -> dict[int, Tensor]:
    """What selective checkpointing holds beside autograd, by storage; to be asked while the graph is alive."""
    wrapped = [found.val for found in gc.get_objects() if type(found) is checkpoint._VersionWrapper]
    return {t.untyped_storage().data_ptr(): t for t in wrapped if isinstance(t, Tensor)}
