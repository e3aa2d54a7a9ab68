"""How the copies of one trained model agree at the end of its updates, with what they send counted in its metrics."""

import torch
from torch import Tensor

from paceline.engine.gradient_sync.exchange import ring_bytes
from paceline.engine.gradient_sync.replicas import CompressedSync, LocalSteps, SyncReport
from paceline.engine.mesh import RankMesh
from paceline.engine.optimizer import MasterAdamW, UpdateOutcome
from paceline.engine.sharding import ReplicaSync
from paceline.engine.shards import local_part
from paceline.telemetry.metrics import MetricAccumulator


class CountedSync:
    """`sync` is None where HSDP's own all-reduce sums the gradients. Every rank counts its own bytes: all of them send.

    `lost_on_resume`, if set, is recorded with the next update: the norm of what replicas held back when the checkpoint
    was saved that the run was resumed from.
    """

    def __init__(
        self,
        sync: ReplicaSync | None,
        optimizer: MasterAdamW,
        mesh: RankMesh,
        device: torch.device,
        metric_prefix: str,
    ) -> None:
        self._sync, self._optimizer, self._prefix = sync, optimizer, metric_prefix
        self._mesh, self._device = mesh, device
        self.lost_on_resume: float | None = None

    def end_update(self, outcome: UpdateOutcome, metrics: MetricAccumulator) -> None:
        """Lets replicas agree on the update where that is left to them, and records what they sent for it."""
        num_replicas = self._mesh.sizes.replicate
        if num_replicas == 1:
            return
        if isinstance(self._sync, CompressedSync | LocalSteps):
            report = self._sync.end_update(not outcome.skipped, self._state)
        else:
            num_elements = sum(local_part(master).numel() for master in self._optimizer.masters().values())
            report = SyncReport(ring_bytes(num_elements, num_replicas), 0.0)
        metrics.add(f"{self._prefix}gradient_sync/bytes", report.num_bytes)
        metrics.add(f"{self._prefix}gradient_sync/held_back", report.held_back_share)
        if self.lost_on_resume is not None:
            metrics.add(f"{self._prefix}gradient_sync/lost_on_resume", self.lost_on_resume)
            self.lost_on_resume = None

    def average_now(self, metrics: MetricAccumulator) -> None:
        """Lets replicas that updated by themselves (train.gradient_sync_every) meet now: before anything reads the
        weights for more than an update. Every rank must call it."""
        if isinstance(self._sync, LocalSteps):
            report = self._sync.synchronise(self._state)
            metrics.add(f"{self._prefix}gradient_sync/bytes", report.num_bytes)

    def held_back_norm(self) -> float:
        """Norm over all ranks of what compressed replicas have not sent yet. Every rank must call it."""
        if not isinstance(self._sync, CompressedSync):
            return 0.0
        own_square = torch.tensor(self._sync.residual_norm() ** 2, device=self._device)
        return float(self._mesh.sum(own_square).sqrt())

    def _state(self) -> list[Tensor]:
        tensors = (*self._optimizer.masters().values(), *self._optimizer.moments().values())
        return [local_part(tensor) for tensor in tensors]
