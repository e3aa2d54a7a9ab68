"""Passes of one model, whatever its role: forward-only values and optimiser updates over planned micro-batches.

A role (policy, critic, SFT) says what it reads from the model and what its loss is; planning, accumulation, the
optimiser and what is counted are here once.

Shapes: R response tokens of a micro-batch, in the order of its members.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor

from paceline.algorithms.objective import Metrics, PendingMetrics
from paceline.config.schema import BatchSection, TrainSection
from paceline.engine.activation_offload import ActivationOffload
from paceline.engine.distribution import Shares, distribute
from paceline.engine.gradient_sync.choice import replica_sync_of
from paceline.engine.gradient_sync.counted import CountedSync
from paceline.engine.meeting import meet
from paceline.engine.memory_shortage import TokenBudget, give_back_memory, is_out_of_memory
from paceline.engine.mesh import RankMesh
from paceline.engine.optimizer import MasterAdamW, UpdateOutcome
from paceline.engine.parked_weights import ParkedWeights
from paceline.engine.planning import (
    BatchPlan,
    MicroBatch,
    PlannedRow,
    build_micro_batch,
    check_budget,
    cost_model,
    empty_inputs,
    plan_batch,
)
from paceline.engine.recompute import apply_recompute, decoder_layers
from paceline.engine.samples import FloatArray, TokenPair
from paceline.engine.shapes_met import ShapesMet
from paceline.engine.sharding import ReplicaSync, reshard, shard_model
from paceline.engine.shards import local_part
from paceline.engine.timed_collectives import time_collectives
from paceline.model.inputs import ModelInputs
from paceline.model.loading import CausalModel
from paceline.model.lora import AdaptedModel
from paceline.model.transfer import to_device
from paceline.telemetry.flops import forward_flops, train_flops
from paceline.telemetry.ledger import Ledger, Span
from paceline.telemetry.metrics import MetricAccumulator
from paceline.telemetry.traffic import optimizer_bytes, pass_bytes
from paceline.types import Stage

S = TypeVar("S", bound=TokenPair)

Read = Callable[[CausalModel, ModelInputs], tuple[Tensor, ...]]
"""What a role reads from the model: float32 [R] tensors, the first of them the one that is differentiated."""


@dataclass(frozen=True, slots=True)
class LossOutput:
    """`loss` is a partial sum over the mini-batch's global denominator: those of all micro-batches and ranks add up.
    `metrics` are name to (value, weight), of these members only; `pending` are those still on the device, read once
    the whole update is on its way."""

    loss: Tensor
    metrics: Metrics = field(default_factory=dict)
    pending: tuple[PendingMetrics, ...] = ()


LossOf = Callable[[tuple[Tensor, ...], Sequence[S]], LossOutput]
"""(what `Read` returned, the micro-batch's members) -> loss and metrics."""


class Work(TypedDict):
    """What a pass of a micro-batch does, as spans count it."""

    tokens: int
    flops: float
    num_bytes: int


@dataclass(slots=True)
class Accumulated:
    """What a pass over a mini-batch leaves behind beside its gradients, micro-batch by micro-batch."""

    plan: BatchPlan
    count: int
    """Micro-batches that every rank runs, those without a sample included."""
    largest: int = 0
    """Slots of the largest micro-batch that was begun."""
    num_slots: int = 0
    num_padding: int = 0
    num_new_shapes: int = 0
    work: list[Work] = field(default_factory=list)
    metrics: MetricAccumulator = field(default_factory=MetricAccumulator)
    readers: list[Callable[[], list[Metrics]]] = field(default_factory=list)

    def add(self, micro_batch: MicroBatch, work: Work, output: LossOutput) -> None:
        """A micro-batch is done, forward and backward."""
        self.num_slots += micro_batch.num_slots
        self.num_padding += micro_batch.num_padding
        self.work.append(work)
        self.readers.append(_reader_of(output))

    @property
    def is_complete(self) -> bool:
        """Whether every micro-batch of the plan is done."""
        return len(self.work) == len(self.plan.rows)

    def read_metrics(self) -> Iterator[Metrics]:
        """Every micro-batch's metrics; waits for the device."""
        for reader in self.readers:
            yield from reader()


class ModelEngine:
    """Owns the optimiser of one model and runs every pass over it.

    `samples` of a pass are those of the whole mini-batch, the same on every rank; so are the results. A rank computes
    its share and records metrics of it; what all ranks know alike is recorded by the first only, and ranks that share
    samples (sequence and tensor parallel) are spoken for by one of them, so that metrics merge over ranks.
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
        replica_sync: ReplicaSync | None = None,
        metric_prefix: str = "",
    ) -> None:
        """`num_updates` in all shape the learning rate; None: the model is only read and gets no optimiser.

        `replica_sync`: how copies of the model (replicate axis) agree, in place of what `train.gradient_sync` says.
        `metric_prefix` goes before the names that every role records (`grad_norm`, `lr`, `updates/applied`...).
        """
        self.mesh = mesh or RankMesh.single()
        self._batch, self._train, self._ledger, self._prefix = batch, train, ledger, metric_prefix
        self.budget = TokenBudget(batch.token_budget)
        if num_updates is None:
            model.module.requires_grad_(False)
        else:
            apply_recompute(decoder_layers(model.module, model.shape.num_layers), train)
            replica_sync = replica_sync or replica_sync_of(train, self.mesh)
        self.sharded = shard_model(model, self.mesh, train, replica_sync)
        self.model = self.sharded.model
        if model.device.type == "cpu":
            time_collectives(self.sharded.model, ledger)
        self._offload: ActivationOffload | None = None
        if train.activation_offload:
            self._offload = ActivationOffload(model.device, train.activation_offload_min_kb * 1024)
        self._shapes = ShapesMet()
        self._parked: ParkedWeights | None = None
        if num_updates is None and train.param_offload:
            self._parked = ParkedWeights(self.model.module)
        self._optimizer: MasterAdamW | None = None
        self._replicas: CountedSync | None = None
        self._optimizer_bytes = 0
        if num_updates is not None:
            self._open_optimizer(num_updates)

    def _open_optimizer(self, num_updates: int) -> None:
        parameters = self.sharded.parameters
        self._optimizer = MasterAdamW(
            parameters, self._train, num_updates, mesh=self.mesh, partly_seen=self.sharded.partly_seen
        )
        self._replicas = CountedSync(
            self.sharded.replica_sync, self._optimizer, self.mesh, self.model.device, self._prefix
        )
        num_own = sum(local_part(one).numel() for one in parameters.values() if one.requires_grad)
        self._optimizer_bytes = optimizer_bytes(num_own, self.model.dtype.itemsize)

    @property
    def optimizer(self) -> MasterAdamW:
        """The model's optimiser."""
        assert self._optimizer is not None, "a model that is only read has no optimiser"
        return self._optimizer

    @property
    def replicas(self) -> CountedSync:
        """How the model's copies agree; for one copy, or for an exact sum, there is nothing to do."""
        assert self._replicas is not None, "copies of a model that is only read have nothing to agree on"
        return self._replicas

    @torch.no_grad()
    def forward_only(
        self, samples: Sequence[TokenPair], stage: Stage, read: Read, model: CausalModel | None = None
    ) -> list[FloatArray]:
        """The first tensor of `read`, one value per response token, by sample.

        `model`: another view of this engine's own parameters (without its adapters), which is read in its place.
        """
        model = model or self.model
        budget = self._batch.forward_token_budget or 2 * self._batch.token_budget
        order: list[int] = []
        values: list[Tensor] = []
        here = nullcontext() if self._parked is None else self._parked.here()
        with self._ledger.span(stage), here:
            own, plan, count = self._plan(samples, budget)
            for row in plan.rows:
                micro_batch, ending = self._build(own, row, stage)
                with self._ledger.span(stage, f"pass{ending}", **self._work(micro_batch, is_training=False)):
                    values.append(read(model, micro_batch.inputs)[0].float())
                order += micro_batch.order
            for _ in range(count - len(plan.rows)):
                read(model, empty_inputs(self._batch, model.device, self.mesh.sp_size))
            found = _by_sample(own, order, values)
            reshard(model)
            meet(self.mesh, self._ledger, f"the others' {stage}")
            with self._ledger.span(stage, "exchange", cause="communication"):
                return self._exchange(samples, found)

    def update(
        self,
        samples: Sequence[S],
        stage: Stage,
        read: Read,
        loss_of: LossOf[S],
        metrics: MetricAccumulator,
    ) -> UpdateOutcome:
        """One optimiser update on the samples of a mini-batch that have a gradient (none: moments and decay act)."""
        with self._ledger.span(stage) as span:
            while (done := self.accumulate(samples, stage, read, loss_of, span)) is None:
                self.optimizer.zero_grad()
                give_back_memory(self.model.device)
                metrics.add(f"{self._prefix}memory/out_of_memory_retries", 1)
            with self._ledger.span(stage, "optimizer", num_bytes=self._optimizer_bytes):
                outcome = self.optimizer.step()
            metrics.merge(done.metrics)
            if self.mesh.reports_share:
                for part in done.read_metrics():  # only now: reading a number waits for everything before it
                    for name, (value, weight) in part.items():
                        metrics.add(name, value, weight)
            self._record_plan(done, metrics)
            self._record_outcome(outcome, metrics)
            self.replicas.end_update(outcome, metrics)
        return outcome

    def accumulate(
        self, samples: Sequence[S], stage: Stage, read: Read, loss_of: LossOf[S], span: Span
    ) -> Accumulated | None:
        """Forward and backward of every micro-batch, largest first; the gradients wait for the optimiser's step.

        None: memory ran out, the budget is smaller now, and the gradients there are must be dropped.
        """
        own, plan, count = self._plan(samples, self.budget.tokens)
        done, num_shapes_before = Accumulated(plan, count), len(self._shapes)
        try:
            for number in range(count):
                self.sharded.before_micro_batch(number == count - 1)
                if number < len(plan.rows):
                    self._learn(own, plan.rows[number], stage, read, loss_of, done)
                else:
                    self._pass_through(stage, read)
        except RuntimeError as error:
            if self.mesh.world_size > 1 or not is_out_of_memory(error):
                raise
        if done.is_complete:
            done.num_new_shapes = len(self._shapes) - num_shapes_before
            return done
        # outside the handler: its traceback would keep every tensor of the failed pass alive
        self.budget.shrink(done.largest or self.budget.tokens, own, self._train)
        for work in done.work:  # it is done again, and counts then
            span.add(tokens=-work["tokens"], flops=-work["flops"], num_bytes=-work["num_bytes"])
        return None

    def _learn(
        self,
        own: Sequence[S],
        row: PlannedRow,
        stage: Stage,
        read: Read,
        loss_of: LossOf[S],
        done: Accumulated,
    ) -> None:
        """Forward and backward of one micro-batch; nothing of its graph outlives the call."""
        micro_batch, ending = self._build(own, row, stage)
        done.largest = max(done.largest, micro_batch.num_slots)
        members = [own[index] for index in micro_batch.order]
        with self._ledger.span(stage, f"forward{ending}"), self._kept_activations(done.metrics):
            output = loss_of(read(self.model, micro_batch.inputs), members)
        with self._ledger.span(stage, f"backward{ending}") as backward:
            output.loss.backward()
            work = self._work(micro_batch, is_training=True)
            backward.add(**work)
        done.add(micro_batch, work, output)

    def record_empty(self, metrics: MetricAccumulator) -> None:
        """Counts a mini-batch without a token to train on."""
        if self.mesh.is_first:
            metrics.add(f"{self._prefix}updates/empty", 1)

    def _plan(self, samples: Sequence[S], budget: int) -> tuple[list[S], BatchPlan, int]:
        """This rank's samples, its micro-batches, and the number of micro-batches that every rank runs."""
        cost, sharing = cost_model(self.model.shape), self.mesh.sp_size
        longest = check_budget(samples, self._batch, budget, sharing)
        own = [samples[index] for index in self._shares(samples)[self.mesh.data_index]]
        plan = plan_batch(own, self._batch, budget, cost, sharing, longest)
        return own, plan, self.mesh.max_count(len(plan.rows))

    def _shares(self, samples: Sequence[TokenPair]) -> Shares:
        shares_prompts = self._batch.shares_prefixes and self._batch.layout == "packed"
        return distribute(
            samples, self.mesh.num_data, cost_model(self.model.shape), share_prefixes=shares_prompts
        )

    def _build(self, own: Sequence[TokenPair], row: PlannedRow, stage: Stage) -> tuple[MicroBatch, str]:
        """A micro-batch, and how the names of its spans end."""
        ending = self._shapes.meet(stage, row.num_rows, row.width)
        return build_micro_batch(own, row, self._batch, self.model.device), ending

    def _exchange(self, samples: Sequence[TokenPair], own: list[FloatArray]) -> list[FloatArray]:
        """Every rank's values, by sample, on every rank."""
        gathered = self.mesh.gather_objects(own if self.mesh.reports_share else None)
        parts = [part for part in gathered if part is not None]
        found: dict[int, FloatArray] = {}
        for share, part in zip(self._shares(samples), parts, strict=True):
            found.update(zip(share, part, strict=True))
        return [found[index] for index in range(len(samples))]

    def _pass_through(self, stage: Stage, read: Read) -> None:
        """A forward and backward pass that adds zero to every gradient, for the collectives in it."""
        with self._ledger.span(stage, "no samples left"):
            value_R = read(self.model, empty_inputs(self._batch, self.model.device, self.mesh.sp_size))[0]
            value_R.backward(torch.zeros_like(value_R))

    @contextmanager
    def _kept_activations(self, metrics: MetricAccumulator) -> Iterator[None]:
        """Around a forward pass: what it keeps goes to the host if the settings say so, and is counted."""
        if self._offload is None:
            yield
            return
        before = self._offload.moved_bytes
        with self._offload.passing():
            yield
        metrics.add("memory/activation_bytes_offloaded", self._offload.moved_bytes - before)

    def _record_plan(self, done: Accumulated, metrics: MetricAccumulator) -> None:
        """Effective-token share: samples' own tokens over computed positions, above 1 where prefixes are shared."""
        if not self.mesh.reports_share:
            return
        metrics.add(f"{self._prefix}micro_batches", len(done.plan.rows))
        metrics.add(f"{self._prefix}micro_batches/no_op", done.count - len(done.plan.rows))
        metrics.add(f"{self._prefix}memory/token_budget", self.budget.tokens)
        metrics.add(f"{self._prefix}tokens/laid_out", done.num_slots)
        metrics.add(f"{self._prefix}tokens/padding", done.num_padding)
        metrics.add(f"{self._prefix}batch/distinct_shapes", len(self._shapes))
        metrics.add(f"{self._prefix}batch/new_shapes", done.num_new_shapes)
        metrics.add(f"{self._prefix}samples/overlong", done.plan.num_overlong)
        if done.num_slots:
            metrics.add(
                f"{self._prefix}tokens/effective_share", done.plan.num_tokens / done.num_slots, done.num_slots
            )

    def _record_outcome(self, outcome: UpdateOutcome, metrics: MetricAccumulator) -> None:
        if not self.mesh.is_first:
            return
        metrics.add(f"{self._prefix}grad_norm", outcome.grad_norm)
        metrics.add(f"{self._prefix}lr", outcome.lr)
        metrics.add(f"{self._prefix}updates/applied", int(not outcome.skipped))
        metrics.add(f"{self._prefix}updates/skipped", int(outcome.skipped))

    def _work(self, micro_batch: MicroBatch, is_training: bool) -> Work:
        """This rank's part of a micro-batch's positions and FLOPs (what all ranks count adds up to the whole), and the
        bytes it moves at least; ranks that divide the weights move a part each."""
        shape, segments, num_scored = self.model.shape, micro_batch.segments, micro_batch.num_response_tokens
        if is_training:
            flops = train_flops(shape, segments, num_scored, isinstance(self.model, AdaptedModel))
        else:
            flops = forward_flops(shape, segments, num_scored)
        num_parts = self.mesh.sp_size * self.mesh.tp_size
        part = self.mesh.rank % num_parts
        tokens = micro_batch.num_slots // num_parts + (part < micro_batch.num_slots % num_parts)
        num_bytes = pass_bytes(shape, segments, self.model.dtype.itemsize, is_training=is_training)
        return {"tokens": tokens, "flops": flops / num_parts, "num_bytes": num_bytes // self.mesh.tp_size}


def _by_sample(own: Sequence[TokenPair], order: Sequence[int], values: Sequence[Tensor]) -> list[FloatArray]:
    """Values of micro-batches, laid end to end in `order`, by sample. They come to the host together: one by one the
    host would wait for the device in every micro-batch."""
    if not order:
        return []
    sizes = [len(own[index].response_ids) for index in order]
    pieces = np.split(torch.cat(list(values)).cpu().numpy(), np.cumsum(sizes)[:-1])
    found = dict(zip(order, pieces, strict=True))
    return [found[index] for index in range(len(own))]


def _reader_of(output: LossOutput) -> Callable[[], list[Metrics]]:
    """How to read a micro-batch's metrics; not the output itself, whose loss holds the graph."""
    known, pending = output.metrics, output.pending
    return lambda: [known, *(part.resolve() for part in pending)]


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
    return to_device(torch.from_numpy(np.concatenate(present)), device)
