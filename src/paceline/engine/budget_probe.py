"""How much memory a token of a micro-batch really takes, from two micro-batches of different size."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

_STEP = 256
_SMALLER = 2
"""The second micro-batch has so many times fewer tokens."""


class MemoryMeter(Protocol):
    """Bytes of one device."""

    def held(self) -> int:
        """Allocated now."""
        ...

    def peak(self) -> int:
        """Most allocated since `reset`."""
        ...

    def reset(self) -> None:
        """Starts a new peak."""
        ...


class DeviceMeter:
    """The allocator of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)

    def held(self) -> int:
        self._module.synchronize(self._device)
        return int(self._module.memory_allocated(self._device))

    def peak(self) -> int:
        self._module.synchronize(self._device)
        return int(self._module.max_memory_allocated(self._device))

    def reset(self) -> None:
        self._module.reset_peak_memory_stats(self._device)


@dataclass(frozen=True, slots=True)
class MeasuredCost:
    """Peak of a micro-batch of n tokens above what is held anyway: `fixed` + n * `per_token`, in bytes."""

    held: int
    fixed: float
    per_token: float

    def largest(self, usable: float, most: int) -> int:
        """Most tokens, up to `most`, whose peak stays within `usable` bytes; in steps of 256; 0 when none do."""
        room = usable - self.held - self.fixed
        if self.per_token <= 0.0:
            return most if room >= 0.0 else 0
        fits = int(max(0.0, room) / self.per_token)
        return most if fits >= most else fits // _STEP * _STEP


def measure_cost(run: Callable[[int], None], tokens: int, meter: MemoryMeter) -> MeasuredCost:
    """Fits the cost of a micro-batch. `run(n)` does forward and backward of micro-batches of n tokens with gradients
    of an earlier one in place, and leaves them in place."""
    smaller = max(1, tokens // _SMALLER)
    run(smaller)
    run(smaller)  # gradients are there from the first on, and float32 sums of several from the second
    peaks = []
    held = meter.held()
    for size in (tokens, smaller):
        meter.reset()
        run(size)
        peaks.append(meter.peak() - held)
    if tokens == smaller:
        return MeasuredCost(held, 0.0, peaks[0] / tokens)
    per_token = (peaks[0] - peaks[1]) / (tokens - smaller)
    return MeasuredCost(held, max(0.0, peaks[0] - per_token * tokens), per_token)
