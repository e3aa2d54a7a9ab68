"""Activations on the host between forward and backward pass, copied while the device computes.

Autograd hands every tensor it keeps to a pack hook. Large ones are copied to pinned host memory on a stream of their
own; the device tensor lives on until its copy is done, at most `WINDOW_BYTES` of them at a time, and then goes back to
the allocator. The backward pass asks for them in about the reverse order: asked for one, the copies of the ones before
it are started as well, within the same bound. On a CPU there is nothing to overlap and nothing to gain: copies are
plain and made at once, so that the same code can be compared with the ordinary pass bit by bit.

Parameters (and views of them) are never moved: they are there anyway. A tensor that several operators keep is moved
once. Of one that is divided over ranks (tensor parallelism), this rank's part is moved.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from paceline.engine.shards import local_part

WINDOW_BYTES = 2**30
"""Most bytes on their way to the host, and most bytes fetched ahead, at a time."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Moved:
    """A tensor on the host. `device_tensor` is there while it is copied out, and again from its fetch to its last use.

    `event` says when the copy under way is done; `num_uses` counts the operators that keep it.
    """

    index: int
    host: Tensor
    device: torch.device
    device_tensor: Tensor | None = None
    event: torch.Event | None = None
    fetched: bool = False
    num_uses: int = 0

    @property
    def num_bytes(self) -> int:
        return self.host.numel() * self.host.element_size()


@dataclass(frozen=True, slots=True)
class _MovedPart:
    """This rank's part of a divided tensor, and how the tensor is divided."""

    part: _Moved
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def joined(self, part: Tensor) -> DTensor:
        """The divided tensor with `part` as this rank's."""
        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


@dataclass(slots=True)
class _Pass:
    """What one forward pass moved; older entries go with the graph that holds them."""

    moved: WeakValueDictionary[int, _Moved] = field(default_factory=WeakValueDictionary)
    leaving: deque[_Moved] = field(default_factory=deque)
    known: dict[tuple[Any, ...], _Moved] = field(default_factory=dict)
    leaving_bytes: int = 0
    fetched_bytes: int = 0
    count: int = 0


class ActivationOffload:
    """Moves what is kept inside `passing()` to the host. `moved_bytes` counts everything moved since it was made."""

    def __init__(self, device: torch.device, min_bytes: int, window_bytes: int = WINDOW_BYTES) -> None:
        self._min_bytes, self._window = min_bytes, window_bytes
        self._streams: tuple[torch.Stream, torch.Stream] | None = None
        if device.type != "cpu":
            self._streams = torch.Stream(device), torch.Stream(device)
        self.moved_bytes = 0

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Around a forward pass; its backward pass may run outside."""
        current = _Pass()

        def pack(tensor: Tensor) -> Tensor | _Moved | _MovedPart:
            if not self._movable(tensor):
                return tensor
            if not isinstance(tensor, DTensor):
                return self._move(current, _arrived(tensor))
            part = self._move(current, _arrived(local_part(tensor)))
            return _MovedPart(part, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

        def unpack(kept: Tensor | _Moved | _MovedPart) -> Tensor:
            if isinstance(kept, _MovedPart):
                return kept.joined(self._use(current, kept.part))
            return kept if isinstance(kept, Tensor) else self._use(current, kept)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        self._wait_for_leaving(current, 0)
        current.known.clear()

    def _movable(self, tensor: Tensor) -> bool:
        base = tensor._base
        if isinstance(tensor, nn.Parameter) or isinstance(base, nn.Parameter):
            return False
        if tensor.is_leaf and tensor.requires_grad:
            return False
        part = local_part(tensor)
        large = part.numel() * part.element_size() >= self._min_bytes
        return large and part.layout is torch.strided and _is_dense(part)

    def _move(self, current: _Pass, tensor: Tensor) -> _Moved:
        storage = tensor.untyped_storage().data_ptr()
        key = (
            storage,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor._version,
        )
        moved = current.known.get(
            key
        )  # only while the first copy holds the tensor: an address is given out again
        if moved is None:
            moved = self._copy_out(current, tensor.detach())
            if self._streams is not None:
                current.known[key] = moved
                current.leaving.append(moved)
                current.leaving_bytes += moved.num_bytes
                self._wait_for_leaving(current, self._window)
        moved.num_uses += 1
        return moved

    def _copy_out(self, current: _Pass, tensor: Tensor) -> _Moved:
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._streams is not None)
        moved = _Moved(current.count, host, tensor.device)
        current.moved[current.count] = moved
        current.count += 1
        self.moved_bytes += moved.num_bytes
        if self._streams is None:
            host.copy_(tensor)
            return moved
        out, _ = self._streams
        out.wait_stream(torch.accelerator.current_stream())
        with out:
            host.copy_(tensor, non_blocking=True)
            moved.event = out.record_event()
        moved.device_tensor = tensor
        return moved

    def _wait_for_leaving(self, current: _Pass, most_bytes: int) -> None:
        """Gives device tensors back, oldest first, until at most `most_bytes` are on their way out."""
        while current.leaving and current.leaving_bytes > most_bytes:
            moved = current.leaving.popleft()
            current.leaving_bytes -= moved.num_bytes
            assert moved.event is not None
            # later kernels of the compute stream may reuse the memory, so that stream waits, not the host
            torch.accelerator.current_stream().wait_event(moved.event)
            moved.device_tensor = None
            current.known = {key: other for key, other in current.known.items() if other is not moved}

    def _use(self, current: _Pass, moved: _Moved) -> Tensor:
        if self._streams is None:
            return moved.host
        if not moved.fetched:
            self._fetch(current, moved)
        index = moved.index - 1
        while index >= 0 and current.fetched_bytes < self._window:
            earlier = current.moved.get(index)
            if earlier is not None and not earlier.fetched:
                self._fetch(current, earlier)
            index -= 1
        assert moved.device_tensor is not None and moved.event is not None
        torch.accelerator.current_stream().wait_event(moved.event)
        tensor = moved.device_tensor
        moved.num_uses -= 1
        if moved.num_uses == 0:
            moved.device_tensor = None
            current.fetched_bytes -= moved.num_bytes
        return tensor

    def _fetch(self, current: _Pass, moved: _Moved) -> None:
        assert self._streams is not None
        _, back = self._streams
        # allocated for the compute stream, which may still be using what stood there before: the copy waits for it
        moved.device_tensor = torch.empty_like(moved.host, device=moved.device)
        back.wait_stream(torch.accelerator.current_stream())
        with back:
            moved.device_tensor.copy_(moved.host, non_blocking=True)
            moved.event = back.record_event()
        moved.fetched = True
        current.fetched_bytes += moved.num_bytes


def _arrived(tensor: Tensor) -> Tensor:
    """The result of a collective that may be under way: whatever is launched next waits for it."""
    if isinstance(tensor, AsyncCollectiveTensor):
        result: Tensor = tensor.trigger_wait()
        return result
    return tensor


def _is_dense(tensor: Tensor) -> bool:
    """Whether a copy has the same strides: slices and expanded tensors would come back laid out differently."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
