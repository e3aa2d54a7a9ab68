"""Supervised updates on the role-neutral engine: mean cross-entropy over the assistant's tokens of an update.

Shapes: R response tokens of a micro-batch, in the order of its members.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from torch import Tensor

from paceline.config.schema import Config
from paceline.engine.mesh import RankMesh
from paceline.engine.model_engine import LossOutput, ModelEngine, concatenate
from paceline.engine.optimizer import MasterAdamW, UpdateOutcome
from paceline.engine.samples import FloatArray
from paceline.model.inputs import ModelInputs, score
from paceline.model.loading import CausalModel
from paceline.model.logprob_head import HeadSettings
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator


@dataclass(frozen=True, slots=True)
class SftSample:
    """One row. `response_ids` run from the first learned token to the last; `loss_mask` is 1 on those learned."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    loss_mask: FloatArray

    @classmethod
    def from_tokens(cls, token_ids: Sequence[int], loss_mask: Sequence[int]) -> "SftSample":
        """Cuts a row where learning begins and ends: what follows the last learned token is never computed.

        Raises:
            ValueError: no token is learned, or the first token is, which nothing predicts.
        """
        learned = [position for position, flag in enumerate(loss_mask) if flag]
        if not learned or learned[0] == 0:
            raise ValueError("a row needs a learned token, and one before it to predict it from")
        first, end = learned[0], learned[-1] + 1
        mask = np.asarray(loss_mask[first:end], dtype=np.float32)
        return cls(tuple(token_ids[:first]), tuple(token_ids[first:end]), mask)

    @property
    def num_loss_tokens(self) -> int:
        """Tokens that are learned."""
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class HeldOutLoss:
    """Mean negative log-likelihood per learned token over all held-out rows, in nats."""

    loss: float
    num_tokens: int
    num_rows: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that is beyond the largest float."""
        return math.exp(self.loss) if self.loss < 700.0 else math.inf


class SftEngine:
    """Supervised passes over one model."""

    def __init__(
        self,
        model: CausalModel,
        config: Config,
        ledger: Ledger,
        num_updates: int,
        mesh: RankMesh | None = None,
    ) -> None:
        self.engine = ModelEngine(model, config.train, config.batch, ledger, num_updates, mesh=mesh)
        self._head = HeadSettings(1.0, model.logit_softcap, config.train.logprob_chunk)

    @property
    def model(self) -> CausalModel:
        """The trained model."""
        return self.engine.model

    @property
    def optimizer(self) -> MasterAdamW:
        """The trained model's optimiser."""
        return self.engine.optimizer

    def update(self, samples: Sequence[SftSample], metrics: MetricAccumulator) -> UpdateOutcome:
        """One optimiser update on rows that each have a learned token."""
        num_tokens = sum(sample.num_loss_tokens for sample in samples)
        return self.engine.update(
            samples, "update_actor", self._read, partial(self._loss, num_tokens), metrics
        )

    def evaluate(self, samples: Sequence[SftSample]) -> HeldOutLoss:
        """Loss of the current weights, forward only; summed in float64 whatever the split."""
        scored = self.engine.forward_only(samples, "eval", self._read)
        total = math.fsum(
            -float(np.dot(logprobs.astype(np.float64), sample.loss_mask))
            for logprobs, sample in zip(scored, samples, strict=True)
        )
        num_tokens = sum(sample.num_loss_tokens for sample in samples)
        return HeldOutLoss(total / num_tokens, num_tokens, len(samples))

    def _read(self, model: CausalModel, inputs: ModelInputs) -> tuple[Tensor, ...]:
        return score(model, inputs, self._head)

    def _loss(self, num_tokens: int, values: tuple[Tensor, ...], members: Sequence[SftSample]) -> LossOutput:
        logprob_R, entropy_R = values
        mask_R = concatenate([member.loss_mask for member in members], self.model.device)
        assert mask_R is not None
        loss = -(logprob_R * mask_R).sum() / num_tokens
        learned = float(mask_R.sum())
        entropy = float((entropy_R.detach() * mask_R).sum())
        return LossOutput(
            loss, {"loss/total": (float(loss.detach()), 1.0), "entropy": (entropy / learned, learned)}
        )
