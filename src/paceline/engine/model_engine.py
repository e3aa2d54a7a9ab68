"""Passes of one model, whatever its role: forward-only values and optimiser updates over planned micro-batches.

A role (policy, critic, SFT) says what it reads from the model and what its loss is; planning, accumulation, the
optimiser and what is counted are here once.

Shapes: R response tokens of a micro-batch, in the order of its members.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.config.schema import BatchSection, TrainSection
from paceline.engine.mesh import RankMesh
from paceline.engine.optimizer import MasterAdamW, UpdateOutcome
from paceline.engine.planning import BatchPlan, MicroBatch, build_micro_batch, cost_model, plan_batch
from paceline.engine.recompute import apply_recompute, decoder_layers
from paceline.engine.samples import FloatArray, TokenPair
from paceline.model.inputs import ModelInputs
from paceline.model.loading import CausalModel
from paceline.telemetry.flops import forward_flops
from paceline.telemetry.ledger import Ledger, Span
from paceline.telemetry.metrics import MetricAccumulator
from paceline.types import Stage

S = TypeVar("S", bound=TokenPair)

Read = Callable[[CausalModel, ModelInputs], tuple[Tensor, ...]]
"""What a role reads from the model: float32 [R] tensors, the first of them the one that is differentiated."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """`loss` is a partial sum over the mini-batch's global denominator: those of all micro-batches and ranks add up.
    `metrics` are name to (value, weight), of these members only."""

    loss: Tensor
    metrics: dict[str, tuple[float, float]]


LossOf = Callable[[tuple[Tensor, ...], Sequence[S]], LossOutput]
"""(what `Read` returned, the micro-batch's members) -> loss and metrics."""


class ModelEngine:
    """Owns the optimiser of one model and runs every pass over it.

    `samples` of a pass are those of the whole mini-batch, the same on every rank; so are the results.
    """

    def __init__(
        self,
        model: CausalModel,
        train: TrainSection,
        batch: BatchSection,
        ledger: Ledger,
        num_updates: int | None,
        *,
        mesh: RankMesh | None = None,
        metric_prefix: str = "",
    ) -> None:
        """`num_updates` in all shape the learning rate; None: the model is only read and gets no optimiser.

        `metric_prefix` goes before the names that every role records (`grad_norm`, `lr`, `updates/applied`...).
        """
        self.model, self.mesh = model, mesh or RankMesh.single()
        self._train, self._batch, self._ledger, self._prefix = train, batch, ledger, metric_prefix
        self._optimizer: MasterAdamW | None = None
        if num_updates is not None:
            apply_recompute(decoder_layers(model.module, model.shape.num_layers), train)
            self._optimizer = MasterAdamW(dict(model.module.named_parameters()), train, num_updates)

    @property
    def optimizer(self) -> MasterAdamW:
        """The model's optimiser."""
        assert self._optimizer is not None, "a model that is only read has no optimiser"
        return self._optimizer

    @torch.no_grad()
    def forward_only(
        self, samples: Sequence[TokenPair], stage: Stage, read: Read, model: CausalModel | None = None
    ) -> list[FloatArray]:
        """The first tensor of `read`, one value per response token, by sample; from `model` (default: its own)."""
        model = model or self.model
        batch = self._batch
        budget = batch.forward_token_budget or 2 * batch.token_budget
        found: dict[int, FloatArray] = {}
        with self._ledger.span(stage) as span:
            plan = plan_batch(samples, batch, budget, cost_model(model.shape))
            for row, width in plan.rows:
                micro_batch = build_micro_batch(samples, row, width, batch.share_prefixes, model.device)
                values_R = read(model, micro_batch.inputs)[0]
                sizes = [len(samples[index].response_ids) for index in micro_batch.order]
                pieces = np.split(values_R.float().cpu().numpy(), np.cumsum(sizes)[:-1])
                found.update(zip(micro_batch.order, pieces, strict=True))
                _count_work(span, model, micro_batch, num_passes=1)
        return [found[index] for index in range(len(samples))]

    def update(
        self,
        samples: Sequence[S],
        stage: Stage,
        read: Read,
        loss_of: LossOf[S],
        metrics: MetricAccumulator,
    ) -> UpdateOutcome:
        """One optimiser update on the samples of a mini-batch that have a gradient (none: moments and decay act)."""
        batch = self._batch
        with self._ledger.span(stage) as span:
            plan = plan_batch(samples, batch, batch.token_budget, cost_model(self.model.shape))
            num_slots = 0
            for row, width in plan.rows:
                micro_batch = build_micro_batch(samples, row, width, batch.share_prefixes, self.model.device)
                members = [samples[index] for index in micro_batch.order]
                self._forward_backward(micro_batch, members, stage, read, loss_of, metrics)
                _count_work(span, self.model, micro_batch, num_passes=3)
                num_slots += micro_batch.num_slots
            with self._ledger.span(stage, "optimizer"):
                outcome = self.optimizer.step()
            self._record_plan(plan, num_slots, metrics)
            self._record_outcome(outcome, metrics)
        return outcome

    def record_empty(self, metrics: MetricAccumulator) -> None:
        """Counts a mini-batch without a token to train on."""
        metrics.add(f"{self._prefix}updates/empty", 1)

    def _forward_backward(
        self,
        micro_batch: MicroBatch,
        members: Sequence[S],
        stage: Stage,
        read: Read,
        loss_of: LossOf[S],
        metrics: MetricAccumulator,
    ) -> None:
        with self._ledger.span(stage, "forward"):
            output = loss_of(read(self.model, micro_batch.inputs), members)
        with self._ledger.span(stage, "backward"):
            output.loss.backward()
        for name, (value, weight) in output.metrics.items():
            metrics.add(name, value, weight)

    def _record_plan(self, plan: BatchPlan, num_slots: int, metrics: MetricAccumulator) -> None:
        """Effective-token share: samples' own tokens over computed positions, above 1 where prefixes are shared."""
        metrics.add(f"{self._prefix}micro_batches", len(plan.rows))
        metrics.add(f"{self._prefix}tokens/laid_out", num_slots)
        metrics.add(f"{self._prefix}samples/overlong", plan.num_overlong)
        if num_slots:
            metrics.add(f"{self._prefix}tokens/effective_share", plan.num_tokens / num_slots, num_slots)

    def _record_outcome(self, outcome: UpdateOutcome, metrics: MetricAccumulator) -> None:
        metrics.add(f"{self._prefix}grad_norm", outcome.grad_norm)
        metrics.add(f"{self._prefix}lr", outcome.lr)
        metrics.add(f"{self._prefix}updates/applied", int(not outcome.skipped))
        metrics.add(f"{self._prefix}updates/skipped", int(outcome.skipped))


def concatenate(arrays: Sequence[FloatArray | None], device: torch.device) -> Tensor | None:
    """Per-sample arrays end to end on the device; None when none of them is there.

    Raises:
        ValueError: some are there and some are not.
    """
    present = [array for array in arrays if array is not None]
    if not present:
        return None
    if len(present) != len(arrays):
        raise ValueError("some samples of a micro-batch carry this value and some do not")
    return torch.from_numpy(np.concatenate(present)).to(device)


def _count_work(span: Span, model: CausalModel, micro_batch: MicroBatch, num_passes: int) -> None:
    """Adds a micro-batch's positions and FLOPs; forward and backward are three passes, forward alone is one."""
    flops = forward_flops(model.shape, micro_batch.segments, micro_batch.num_response_tokens)
    span.add(tokens=micro_batch.num_slots, flops=num_passes * flops)
