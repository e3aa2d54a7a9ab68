"""The critic on the role-neutral engine: values of response tokens, and updates towards their returns.

Shapes: R response tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from paceline.algorithms.denominators import Denominator
from paceline.algorithms.losses.value import ValueInputs
from paceline.algorithms.value_objective import value_objective
from paceline.config.critic import critic_batch, critic_train, num_critic_updates
from paceline.config.schema import Config
from paceline.engine.mesh import RankMesh
from paceline.engine.model_engine import LossOutput, ModelEngine, concatenate
from paceline.engine.optimizer import MasterAdamW, UpdateOutcome
from paceline.engine.samples import TrainSample, denominator_of
from paceline.model.inputs import ModelInputs
from paceline.model.loading import CausalModel
from paceline.model.value_head import ValueModel, response_values
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator

METRIC_PREFIX = "critic/"


class CriticEngine:
    """The critic's passes, with an optimiser and token budgets of its own (section `critic`)."""

    def __init__(
        self, model: ValueModel, config: Config, ledger: Ledger, mesh: RankMesh | None = None
    ) -> None:
        self._config = config
        self.engine = ModelEngine(
            model,
            critic_train(config),
            critic_batch(config),
            ledger,
            num_critic_updates(config),
            mesh=mesh,
            metric_prefix=METRIC_PREFIX,
        )

    @property
    def optimizer(self) -> MasterAdamW:
        """The critic's optimiser."""
        return self.engine.optimizer

    def with_values(self, samples: Sequence[TrainSample]) -> list[TrainSample]:
        """The samples with the value before every response token, forward only."""
        found = self.engine.forward_only(samples, "values", _read)
        return [replace(sample, values=values) for sample, values in zip(samples, found, strict=True)]

    def update(self, samples: Sequence[TrainSample], metrics: MetricAccumulator) -> UpdateOutcome | None:
        """One optimiser update on a mini-batch; None when no token is left to train on (counted, nothing moves).

        The loss is a mean over the mini-batch's loss tokens, whatever aggregation the policy's loss has: each is a
        state whose value is asked for. Samples need `values` (before the rollout's first update) and `returns`.
        """
        denominator = denominator_of(samples, self._config.rollout.max_new_tokens)
        if denominator.num_tokens == 0:
            self.engine.record_empty(metrics)
            return None
        trained = [sample for sample in samples if sample.num_loss_tokens]
        return self.engine.update(trained, "update_critic", _read, partial(self._loss, denominator), metrics)

    def _loss(
        self, denominator: Denominator, values: tuple[Tensor, ...], members: Sequence[TrainSample]
    ) -> LossOutput:
        (value_R,) = values
        device = value_R.device
        mask_R = _all_of([m.loss_mask for m in members], device)
        inputs = ValueInputs(
            value_T=value_R,
            old_value_T=_all_of([m.values for m in members], device),
            return_T=_all_of([m.returns for m in members], device),
            weight_T=mask_R / denominator.num_tokens,
            loss_mask_T=mask_R,
        )
        output = value_objective(inputs, self._config.algorithm.value_clip)
        return LossOutput(output.loss, pending=(output.pending,))


def _read(model: CausalModel, inputs: ModelInputs) -> tuple[Tensor, ...]:
    assert isinstance(model, ValueModel)
    return (response_values(model, inputs),)


def _all_of(arrays: Sequence[np.ndarray | None], device: torch.device) -> Tensor:
    """Per-sample arrays end to end. Raises `ValueError` when a sample has none: the critic has not seen it."""
    found = concatenate(arrays, device)
    if found is None:
        raise ValueError("these samples carry no values or returns: estimate them before an update")
    return found
