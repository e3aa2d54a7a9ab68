"""The policy on the role-neutral engine: its log-probs, and updates of its objective.

Shapes: R response tokens of a micro-batch, N samples of a mini-batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from paceline.algorithms.denominators import Denominator, aggregation_weights
from paceline.algorithms.losses import LossInputs
from paceline.algorithms.objective import policy_objective
from paceline.config.decisions import LogprobSource
from paceline.config.schema import Config
from paceline.engine.mesh import RankMesh
from paceline.engine.model_engine import LossOutput, ModelEngine, concatenate
from paceline.engine.optimizer import MasterAdamW, UpdateOutcome
from paceline.engine.samples import FloatArray, TrainSample, denominator_of
from paceline.model.inputs import ModelInputs, score
from paceline.model.loading import CausalModel
from paceline.model.logprob_head import HeadSettings
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator
from paceline.types import Stage


class TrainEngine:
    """The policy's passes: scoring with any model at its temperature, and updates of the trained one."""

    def __init__(
        self,
        model: CausalModel,
        config: Config,
        ledger: Ledger,
        num_updates: int,
        mesh: RankMesh | None = None,
    ) -> None:
        self._config, self._ledger = config, ledger
        self.engine = ModelEngine(model, config.train, config.batch, ledger, num_updates, mesh=mesh)
        self._head = HeadSettings(
            temperature=config.rollout.temperature,
            softcap=model.logit_softcap,
            chunk=config.train.logprob_chunk,
            with_entropy_grad=config.algorithm.entropy_coefficient > 0.0,
        )

    @property
    def model(self) -> CausalModel:
        """The trained model."""
        return self.engine.model

    @property
    def optimizer(self) -> MasterAdamW:
        """The trained model's optimiser."""
        return self.engine.optimizer

    def score(
        self,
        samples: Sequence[TrainSample],
        stage: Stage,
        model: ModelEngine | CausalModel | None = None,
    ) -> list[FloatArray]:
        """Log-probs of every response token, per sample, forward only.

        From the trained model, from another with an engine (and so a mesh) of its own, or from another view of the
        trained model's parameters. On one rank that other view may be any model.
        """
        if isinstance(model, ModelEngine):
            return model.forward_only(samples, stage, self._read)
        return self.engine.forward_only(samples, stage, self._read, model)

    def update(self, samples: Sequence[TrainSample], metrics: MetricAccumulator) -> UpdateOutcome | None:
        """One optimiser update on a mini-batch; None when no token is left to train on (counted, nothing moves)."""
        denominator = denominator_of(samples, self._config.rollout.max_new_tokens)
        if denominator.num_tokens == 0:
            self.engine.record_empty(metrics)
            return None
        trained = self._with_gradient(samples, metrics)
        return self.engine.update(
            trained, "update_actor", self._read, partial(self._loss, denominator), metrics
        )

    def _read(self, model: CausalModel, inputs: ModelInputs) -> tuple[Tensor, ...]:
        return score(model, inputs, self._head)

    def _with_gradient(self, samples: Sequence[TrainSample], metrics: MetricAccumulator) -> list[TrainSample]:
        """Samples whose gradient can be other than zero; the others are counted and stay in the denominator."""
        algorithm = self._config.algorithm
        trained = [sample for sample in samples if sample.num_loss_tokens]
        if self.engine.mesh.is_first:
            metrics.add("samples/masked", len(samples) - len(trained))
        only_policy = algorithm.entropy_coefficient == 0.0 and not (
            algorithm.kl_coefficient > 0.0 and algorithm.kl_placement == "loss"
        )
        if self._config.batch.skip_zero_advantage and only_policy:
            moving = [sample for sample in trained if sample.has_advantage]
            if self.engine.mesh.is_first:
                metrics.add("samples/zero_advantage_skipped", len(trained) - len(moving))
                num_skipped = sum(s.num_tokens for s in trained) - sum(s.num_tokens for s in moving)
                metrics.add("tokens/zero_advantage_skipped", num_skipped)
            return moving
        return trained

    def _loss(
        self, denominator: Denominator, values: tuple[Tensor, ...], members: Sequence[TrainSample]
    ) -> LossOutput:
        logprob_R, entropy_R = values
        inputs = self._loss_inputs(members, logprob_R, denominator)
        reference_R = concatenate([m.ref_logprobs for m in members], self.model.device)
        output = policy_objective(inputs, entropy_R, reference_R, self._config.algorithm)
        return LossOutput(output.loss, output.metrics | _mismatch(members, logprob_R.detach()))

    def _loss_inputs(
        self, members: Sequence[TrainSample], logprob_R: Tensor, denominator: Denominator
    ) -> LossInputs:
        device = self.model.device
        sizes_N = torch.tensor([len(m.response_ids) for m in members], device=device)
        sample_index_R = torch.arange(len(members), device=device).repeat_interleave(sizes_N)
        mask_R = _require(concatenate([m.loss_mask for m in members], device))
        tokens_N = torch.tensor([float(m.num_loss_tokens) for m in members], device=device)
        old_R = concatenate([m.old_logprobs for m in members], device)
        assert self._config.algorithm.aggregation is not None
        return LossInputs(
            logprob_T=logprob_R,
            old_logprob_T=logprob_R.detach() if old_R is None else old_R,
            advantage_T=_require(concatenate([m.advantages for m in members], device)),
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


def _require(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor


def _mismatch(members: Sequence[TrainSample], logprob_R: Tensor) -> dict[str, tuple[float, float]]:
    """How far the trainer's log-probs are from those the engine sampled with, in nats."""
    sampled = np.concatenate([m.rollout_logprobs for m in members])
    mask = np.concatenate([m.loss_mask for m in members]) > 0
    difference = np.abs(logprob_R.float().cpu().numpy() - sampled)[mask]
    return {
        "rollout/logprob_difference_mean": (float(difference.mean()), len(difference)),
        "rollout/logprob_difference_max": (float(difference.max()), 1.0),
    }
