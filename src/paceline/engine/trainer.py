"""Forward-only scoring and optimiser updates of one model on one rank.

Shapes: R response tokens of a micro-batch, N samples of a mini-batch.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from paceline.algorithms.denominators import Denominator, aggregation_weights
from paceline.algorithms.losses import LossInputs
from paceline.algorithms.objective import policy_objective
from paceline.config.decisions import LogprobSource
from paceline.config.schema import Config
from paceline.engine.optimizer import MasterAdamW, UpdateOutcome
from paceline.engine.planning import BatchPlan, MicroBatch, build_micro_batch, cost_model, plan_batch
from paceline.engine.samples import FloatArray, TrainSample, denominator_of
from paceline.model.inputs import score
from paceline.model.loading import CausalModel
from paceline.model.logprob_head import HeadSettings
from paceline.telemetry.flops import forward_flops
from paceline.telemetry.ledger import Ledger, Span
from paceline.telemetry.metrics import MetricAccumulator
from paceline.types import Stage


class TrainEngine:
    """Owns the optimiser of `model` and runs every pass of the trainer over it."""

    def __init__(self, model: CausalModel, config: Config, ledger: Ledger, num_updates: int) -> None:
        self.model, self._config, self._ledger = model, config, ledger
        if config.train.gradient_checkpointing:
            model.module.train()  # transformers checkpoints in train mode only; no tested family has dropout on
            model.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.optimizer = MasterAdamW(dict(model.module.named_parameters()), config.train, num_updates)
        self._head = HeadSettings(
            temperature=config.rollout.temperature,
            softcap=model.logit_softcap,
            chunk=config.train.logprob_chunk,
            with_entropy_grad=config.algorithm.entropy_coefficient > 0.0,
        )

    @torch.no_grad()
    def score(
        self, samples: Sequence[TrainSample], stage: Stage, model: CausalModel | None = None
    ) -> list[FloatArray]:
        """Log-probs of every response token, per sample, from `model` (default: the trained one), forward only."""
        model = model or self.model
        batch = self._config.batch
        budget = batch.forward_token_budget or 2 * batch.token_budget
        found: dict[int, FloatArray] = {}
        with self._ledger.span(stage) as span:
            plan = plan_batch(samples, batch, budget, cost_model(model.shape))
            for row, width in plan.rows:
                micro_batch = build_micro_batch(samples, row, width, batch.share_prefixes, model.device)
                logprobs_R, _ = score(model, micro_batch.inputs, self._head)
                sizes = [len(samples[index].response_ids) for index in micro_batch.order]
                pieces = np.split(logprobs_R.float().cpu().numpy(), np.cumsum(sizes)[:-1])
                found.update(zip(micro_batch.order, pieces, strict=True))
                _count_work(span, model, micro_batch, num_passes=1)
        return [found[index] for index in range(len(samples))]

    def update(self, samples: Sequence[TrainSample], metrics: MetricAccumulator) -> UpdateOutcome | None:
        """One optimiser update on a mini-batch; None when no token is left to train on (counted, nothing moves)."""
        with self._ledger.span("update_actor") as span:
            denominator = denominator_of(samples, self._config.rollout.max_new_tokens)
            if denominator.num_tokens == 0:
                metrics.add("updates/empty", 1)
                return None
            trained = self._with_gradient(samples, metrics)
            batch, device = self._config.batch, self.model.device
            plan = plan_batch(trained, batch, batch.token_budget, cost_model(self.model.shape))
            num_slots = 0
            for row, width in plan.rows:
                micro_batch = build_micro_batch(trained, row, width, batch.share_prefixes, device)
                self._forward_backward(micro_batch, trained, denominator, metrics)
                _count_work(span, self.model, micro_batch, num_passes=3)
                num_slots += micro_batch.num_slots
            with self._ledger.span("update_actor", "optimizer"):
                outcome = self.optimizer.step()
            _record_plan(plan, num_slots, metrics)
            metrics.add("grad_norm", outcome.grad_norm)
            metrics.add("lr", outcome.lr)
            metrics.add("updates/applied", int(not outcome.skipped))
            metrics.add("updates/skipped", int(outcome.skipped))
            return outcome

    def _with_gradient(self, samples: Sequence[TrainSample], metrics: MetricAccumulator) -> list[TrainSample]:
        """Samples whose gradient can be other than zero; the others are counted and stay in the denominator."""
        algorithm = self._config.algorithm
        trained = [sample for sample in samples if sample.num_loss_tokens]
        metrics.add("samples/masked", len(samples) - len(trained))
        only_policy = algorithm.entropy_coefficient == 0.0 and not (
            algorithm.kl_coefficient > 0.0 and algorithm.kl_placement == "loss"
        )
        if self._config.batch.skip_zero_advantage and only_policy:
            moving = [sample for sample in trained if sample.has_advantage]
            metrics.add("samples/zero_advantage_skipped", len(trained) - len(moving))
            metrics.add(
                "tokens/zero_advantage_skipped",
                sum(s.num_tokens for s in trained) - sum(s.num_tokens for s in moving),
            )
            return moving
        return trained

    def _forward_backward(
        self,
        micro_batch: MicroBatch,
        samples: Sequence[TrainSample],
        denominator: Denominator,
        metrics: MetricAccumulator,
    ) -> None:
        members = [samples[index] for index in micro_batch.order]
        with self._ledger.span("update_actor", "forward"):
            logprob_R, entropy_R = score(self.model, micro_batch.inputs, self._head)
            inputs = self._loss_inputs(members, logprob_R, denominator)
            reference_R = _concatenate([m.ref_logprobs for m in members], self.model.device)
            output = policy_objective(inputs, entropy_R, reference_R, self._config.algorithm)
        with self._ledger.span("update_actor", "backward"):
            output.loss.backward()
        for name, (value, weight) in output.metrics.items():
            metrics.add(name, value, weight)
        _record_mismatch(members, logprob_R.detach(), metrics)

    def _loss_inputs(
        self, members: Sequence[TrainSample], logprob_R: Tensor, denominator: Denominator
    ) -> LossInputs:
        device = self.model.device
        sizes_N = torch.tensor([len(m.response_ids) for m in members], device=device)
        sample_index_R = torch.arange(len(members), device=device).repeat_interleave(sizes_N)
        mask_R = _require(_concatenate([m.loss_mask for m in members], device))
        tokens_N = torch.tensor([float(m.num_loss_tokens) for m in members], device=device)
        old_R = _concatenate([m.old_logprobs for m in members], device)
        assert self._config.algorithm.aggregation is not None
        return LossInputs(
            logprob_T=logprob_R,
            old_logprob_T=logprob_R.detach() if old_R is None else old_R,
            advantage_T=_require(_concatenate([m.advantages for m in members], device)),
            weight_T=aggregation_weights(
                self._config.algorithm.aggregation, sample_index_R, mask_R, tokens_N, denominator
            ),
            loss_mask_T=mask_R,
            sample_index_T=sample_index_R,
            num_samples=len(members),
        )


def with_old_logprobs(
    engine: TrainEngine, groups: Sequence[Sequence[TrainSample]], source: LogprobSource
) -> list[list[TrainSample]]:
    """Attaches the old log-probs a decision asks for: none (current), the sampled ones, or a recomputation."""
    if source == "current":
        return [list(group) for group in groups]
    if source == "rollout":
        return [[replace(sample, old_logprobs=sample.rollout_logprobs) for sample in g] for g in groups]
    scored = iter(engine.score([sample for group in groups for sample in group], "old_logprob"))
    return [[replace(sample, old_logprobs=next(scored)) for sample in group] for group in groups]


def _concatenate(arrays: Sequence[FloatArray | None], device: torch.device) -> Tensor | None:
    """All arrays end to end on the device; None when none of them is there."""
    present = [array for array in arrays if array is not None]
    if not present:
        return None
    if len(present) != len(arrays):
        raise ValueError("some samples of a micro-batch carry this log-prob and some do not")
    return torch.from_numpy(np.concatenate(present)).to(device)


def _require(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _count_work(span: Span, model: CausalModel, micro_batch: MicroBatch, num_passes: int) -> None:
    """Adds a micro-batch's positions and FLOPs; forward and backward are three passes, forward alone is one."""
    flops = forward_flops(model.shape, micro_batch.segments, micro_batch.num_response_tokens)
    span.add(tokens=micro_batch.num_slots, flops=num_passes * flops)


def _record_plan(plan: BatchPlan, num_slots: int, metrics: MetricAccumulator) -> None:
    """Effective-token share: samples' own tokens over computed positions, above 1 where prefixes are shared."""
    metrics.add("micro_batches", len(plan.rows))
    metrics.add("tokens/laid_out", num_slots)
    metrics.add("samples/overlong", plan.num_overlong)
    if num_slots:
        metrics.add("tokens/effective_share", plan.num_tokens / num_slots, num_slots)


def _record_mismatch(members: Sequence[TrainSample], logprob_R: Tensor, metrics: MetricAccumulator) -> None:
    """How far the trainer's log-probs are from those the engine sampled with, in nats."""
    sampled = np.concatenate([m.rollout_logprobs for m in members])
    mask = np.concatenate([m.loss_mask for m in members]) > 0
    difference = np.abs(logprob_R.float().cpu().numpy() - sampled)[mask]
    metrics.add("rollout/logprob_difference_mean", float(difference.mean()), len(difference))
    metrics.add("rollout/logprob_difference_max", float(difference.max()))
