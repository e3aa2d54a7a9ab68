"""How the replicas of one model (HSDP's outer axis) agree, where the link between them is too slow for exact sums.

FSDP shards each replica on its own; its all-reduce hook is where a replica's gradient, already summed over the ranks
that share it, meets those of the others. Three ways:

exact               HSDP's own all-reduce; nothing of this module runs.
`CompressedSync`    every update, what a compressor makes of gradient + what was held back (error feedback).
`LocalSteps`        every k-th update: each replica updates by itself, then weights and moments are averaged.

Shapes: N elements of one FSDP part's flat gradient shard.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.engine.gradient_sync.compression import Compressor
from paceline.engine.gradient_sync.exchange import exchange, ring_bytes

AllReduceHook = Callable[[Tensor], None]
StateOf = Callable[[], Iterable[Tensor]]
"""This rank's parts of masters and moments, plain tensors that share the optimiser's memory."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What one update sent: `num_bytes` to other replicas by this rank, and the norm of what it holds back over the
    norm of what it had to send (0 where nothing is held back)."""

    num_bytes: int
    held_back_share: float


class _Part:
    """One FSDP part. `residual`: held back by earlier updates; `collected`: gradients of this update's micro-batches
    so far; `pending`: what becomes the residual if the update is applied."""

    def __init__(self) -> None:
        self.residual_N: Tensor | None = None
        self.collected_N: Tensor | None = None
        self.pending_N: Tensor | None = None
        self.squares: Tensor | None = None
        self.num_bytes = 0


class CompressedSync:
    """Sums of compressed gradients with error feedback: g' = C(g + e), e = g + e - C(g + e), per replica and part.

    Compression happens once per update, behind the last micro-batch, on the sum over all of them. An update that is
    skipped for a gradient that is not finite leaves e as it was: its gradient is dropped whole, as it is without
    compression. Every replica decodes every payload, so all see the same sum and skip alike.

    Memory: up to two float32 copies of the gradient shard (residual; collected or pending).
    """

    def __init__(self, compressor: Compressor, group: dist.ProcessGroup) -> None:
        self._compressor, self._group = compressor, group
        self._parts: list[_Part] = []
        self._is_last = True

    def hook(self) -> AllReduceHook:
        """The all-reduce hook of one more FSDP part; parts must be asked for in the same order on every replica."""
        part = _Part()
        self._parts.append(part)
        return lambda gradient_N: self._reduce(part, gradient_N)

    def expect(self, is_last: bool) -> None:
        """Says whether the micro-batch to come is the update's last."""
        self._is_last = is_last

    @torch.no_grad()
    def _reduce(self, part: _Part, gradient_N: Tensor) -> None:
        if part.collected_N is not None:
            gradient_N += part.collected_N
        if not self._is_last:
            part.collected_N = gradient_N.clone()
            gradient_N.zero_()  # FSDP adds it to the parameters' gradients: everything arrives with the last one
            return
        part.collected_N = None
        if part.residual_N is not None:
            gradient_N += part.residual_N
        found = exchange(gradient_N, self._compressor, self._group)
        part.pending_N, part.num_bytes = found.held_back_N, found.num_bytes
        part.squares = torch.stack([found.held_back_N.square().sum(), gradient_N.square().sum()])
        gradient_N.copy_(found.sum_N)

    def end_update(self, applied: bool, state: StateOf) -> SyncReport:
        """Takes over what was held back, if the update was `applied`, and says what it sent. Replicas' weights never
        differ, so `state` is not asked for."""
        num_bytes = sum(part.num_bytes for part in self._parts)
        squares = [part.squares for part in self._parts if part.squares is not None]
        held_back, total = torch.stack(squares).sum(dim=0).tolist() if squares and applied else (0.0, 0.0)
        for part in self._parts:
            if applied and part.pending_N is not None:
                part.residual_N = part.pending_N
            part.pending_N = part.squares = part.collected_N = None
            part.num_bytes = 0
        return SyncReport(num_bytes, math.sqrt(held_back / total) if total else 0.0)

    @property
    def residuals(self) -> list[Tensor]:
        """What this rank holds back, by part; parts that hold back nothing yet are left out."""
        return [part.residual_N for part in self._parts if part.residual_N is not None]

    def residual_norm(self) -> float:
        """Norm of everything this rank holds back."""
        return math.sqrt(sum(float(residual.square().sum()) for residual in self.residuals))


class LocalSteps:
    """Every replica updates by itself; after `every` updates, masters and moments become their means over replicas.

    A replica's loss is a partial sum over the denominator of all replicas, so its gradient stands for 1/n of the whole:
    it is multiplied by n, and is then an unbiased estimate of the whole gradient from a replica's own samples. Clipping
    and the decision to skip use the root mean square of the replicas' gradient norms, which all of them know.
    After averaging, replicas are bit-equal again. Averages of AdamW's weights are not AdamW's weights of the averaged
    gradient: this changes the optimisation, more so with larger `every` and learning rate.
    """

    def __init__(self, every: int, group: dist.ProcessGroup) -> None:
        self._every, self._group = every, group
        self.num_since_sync = 0

    def hook(self) -> AllReduceHook:
        """The all-reduce hook of an FSDP part: no communication."""
        num_replicas = self._group.size()

        def scale(gradient_N: Tensor) -> None:
            gradient_N *= num_replicas

        return scale

    def expect(self, is_last: bool) -> None:
        """Each micro-batch is scaled alike."""

    def end_update(self, applied: bool, state: StateOf) -> SyncReport:
        """Counts an update, `applied` or skipped (by all replicas alike), and averages `state()` if it is the k-th."""
        self.num_since_sync += 1
        return self.synchronise(state) if self.num_since_sync >= self._every else SyncReport(0, 0.0)

    @torch.no_grad()
    def synchronise(self, state: StateOf) -> SyncReport:
        """Averages now, unless nothing was updated since the last time. All replicas must call it."""
        if self.num_since_sync == 0:
            return SyncReport(0, 0.0)
        self.num_since_sync = 0
        num_elements = 0
        for tensor in state():
            dist.all_reduce(tensor, group=self._group)
            tensor /= self._group.size()
            num_elements += tensor.numel()
        return SyncReport(ring_bytes(num_elements, self._group.size()), 0.0)
