"""A clock that the machine's load cannot move: tensors' operations cost what they would on a device of known speed."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import paceline.schedules.place

CALL_S, BYTES_PER_S, FLOPS_PER_S = 3e-5, 1e10, 5e10
"""A slow device, so that the tiny runs of tests take about as long by its clock as by the machine's."""


class SimulatedDevice(TorchDispatchMode):
    """Counts the seconds of every operation that the entering thread's tensors go through, backward passes included.

    An operation takes a fixed time for its launch, and the longer of what its bytes and its floating-point operations
    need. A view takes the launch alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seconds += CALL_S
        if not func.is_view:
            moved = sum(
                leaf.numel() * leaf.element_size()
                for leaf in tree_leaves((args, kwargs, result))
                if isinstance(leaf, torch.Tensor)
            )
            count = flop_registry.get(func.overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=result) if count else 0
            self.seconds += max(moved / BYTES_PER_S, flops / FLOPS_PER_S)
        return result

    def sleep(self, seconds: float) -> None:
        """Lets time pass."""
        self.seconds += seconds

    @contextmanager
    def keeps_time(self) -> Iterator[Callable[[float], None]]:
        """While open, this thread's operations move the only clock that a run and its test read; gives `sleep`."""
        with pytest.MonkeyPatch.context() as patched, self:
            patched.setattr(time, "perf_counter", lambda: self.seconds)
            ledger = partial(paceline.schedules.place.Ledger, clock_ns=lambda: int(self.seconds * 1e9))
            patched.setattr(paceline.schedules.place, "Ledger", ledger)
            yield self.sleep
