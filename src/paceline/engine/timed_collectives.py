"""FSDP's collectives as spans, where they block the host: over gloo, on a CPU.

On a device the host only issues them; what they cost there is seen in a profiled step, not by the host's clock.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from paceline.model.loading import CausalModel
from paceline.telemetry.ledger import Ledger, Span


def time_collectives(model: CausalModel, ledger: Ledger) -> None:
    """Lets every gather and reduction of FSDP's run in a span of cause communication, in the stage that waits for it.
    A model that is not divided has none."""
    if model.root is None:
        return
    for part in model.root.modules():
        if isinstance(part, FSDPModule):
            # their base classes are in a private module; FSDP asks for the two methods alone
            part.set_custom_all_gather(_TimedAllGather(ledger))  # type: ignore[arg-type]
            part.set_custom_reduce_scatter(_TimedReduceScatter(ledger))  # type: ignore[arg-type]


class _Timed:
    """Allocates as FSDP does by default, and opens the span."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _span(self, name: str, moved: Tensor) -> AbstractContextManager[Span | None]:
        """In the innermost stage; outside every span, or in a thread of autograd's own, there is nothing to add to."""
        ledger = self._ledger
        if get_ident() != ledger.thread_id or not ledger.stack:
            return nullcontext()
        num_bytes = moved.numel() * moved.element_size()
        return ledger.span(ledger.stack[-1].stage, name, cause="communication", num_bytes=num_bytes)


class _TimedAllGather(_Timed):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with self._span("gather weights", output_tensor):
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class _TimedReduceScatter(_Timed):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        with self._span("reduce gradients", input_tensor):
            return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)
