"""Tensors that live on the host and visit their device: optimiser states during a step, weights while they are used.

A tensor keeps its identity (the optimiser, a module or a kernel goes on holding it); its storage is empty while the
values are away. Copies run on streams of their own, so that one group's travel while another is worked on. On a CPU
the copies are plain and at once: the same code, for comparison.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


class HostStorage:
    """Host copies by key, and the way there and back."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type != "cpu"
        self._streams: tuple[torch.Stream, torch.Stream] | None = None
        if self._pinned:
            self._streams = torch.Stream(device), torch.Stream(device)
        self._host: dict[str, Tensor] = {}
        self._storage_bytes: dict[str, int] = {}
        self._away: set[str] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes on the host."""
        return sum(tensor.nbytes for tensor in self._host.values())

    def value(self, key: str) -> Tensor:
        """The values of a tensor that is away, on the host."""
        if self._streams is not None:
            self._streams[1].synchronize()
        return self._host[key]

    @torch.no_grad()
    def fetch(self, tensors: Mapping[str, Tensor]) -> torch.Event | None:
        """Brings back those of `tensors` that are away; on a device, work on them must wait for the event."""
        away = {key: tensor for key, tensor in tensors.items() if key in self._away}
        self._away -= away.keys()
        if self._streams is None:
            for key, tensor in away.items():
                self._fill(key, tensor)
            return None
        back, out = self._streams
        back.wait_stream(out)  # an earlier copy out of the same values
        with back:
            for key, tensor in away.items():
                self._fill(key, tensor)
            event: torch.Event = back.record_event()
        return event

    def fetch_now(self, tensors: Mapping[str, Tensor]) -> None:
        """Brings `tensors` back for whatever is launched next."""
        event = self.fetch(tensors)
        if event is not None:
            torch.accelerator.current_stream().wait_event(event)

    @torch.no_grad()
    def put_away(self, tensors: Mapping[str, Tensor], unchanged: bool = False) -> None:
        """Copies `tensors` to the host and empties their storages. `unchanged`: the host has these values already."""
        here = {key: tensor for key, tensor in tensors.items() if key not in self._away}
        self._away |= here.keys()
        for key, tensor in here.items():
            if key not in self._host:
                self._host[key] = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned)
                self._copy_out(key, tensor)
            elif not unchanged:
                self._copy_out(key, tensor)
        for key, tensor in here.items():  # only now: several may share a storage
            self._storage_bytes[key] = max(self._storage_bytes.get(key, 0), tensor.untyped_storage().nbytes())
        for tensor in here.values():
            if (
                self._streams is not None
            ):  # the storage may be given out again once both streams are done with it
                tensor.record_stream(self._streams[1])
                tensor.record_stream(torch.accelerator.current_stream())
            tensor.untyped_storage().resize_(0)

    def _fill(self, key: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:  # not when another tensor of the same storage came first
            storage.resize_(self._storage_bytes[key])
        tensor.copy_(self._host[key], non_blocking=True)

    def _copy_out(self, key: str, tensor: Tensor) -> None:
        if self._streams is None:
            self._host[key].copy_(tensor)
            return
        out = self._streams[1]
        out.wait_stream(torch.accelerator.current_stream())
        with out:
            self._host[key].copy_(tensor, non_blocking=True)

    def visit(
        self,
        groups: Sequence[Sequence[str]],
        tensors_of: Callable[[Sequence[str]], Mapping[str, Tensor]],
        work: Callable[[Sequence[str]], None],
    ) -> None:
        """Does `work` on one group of names after the other, its tensors on the device, the next group's on their way.

        `tensors_of` is asked again after the work, which may have made new ones: they go to the host as well.
        """
        event = self.fetch(tensors_of(groups[0])) if groups else None
        for index, names in enumerate(groups):
            if event is not None:
                torch.accelerator.current_stream().wait_event(event)
            if index + 1 < len(groups):
                event = self.fetch(tensors_of(groups[index + 1]))
            work(names)
            self.put_away(tensors_of(names))


def groups_by_bytes(sizes: Mapping[str, int], most_bytes: int) -> list[list[str]]:
    """Names in order, cut into groups of at most `most_bytes` together; a larger one is alone."""
    groups: list[list[str]] = []
    filled = most_bytes + 1
    for name, size in sizes.items():
        if filled + size > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups
