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
from paceline.algorithms.losses import SEQUENCE_LOSSES, LossInputs
from paceline.algorithms.objective import PendingMetrics, policy_objective
from paceline.config.decisions import LogprobSource
from paceline.config.schema import Config
from paceline.engine.mesh import RankMesh
from paceline.engine.model_engine import LossOf, LossOutput, ModelEngine, Read, concatenate
from paceline.engine.optimizer import MasterAdamW, UpdateOutcome
from paceline.engine.samples import FloatArray, TrainSample, denominator_of
from paceline.model.fused.head import chunks_of_samples, head_loss
from paceline.model.inputs import ModelInputs, score
from paceline.model.loading import CausalModel
from paceline.model.logit_kernels import logit_kernels_for
from paceline.model.logprob_head import HeadSettings
from paceline.model.transfer import to_device
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
        one_pass_head: bool | None = None,
    ) -> None:
        """`one_pass_head`: compute head and loss chunk by chunk in one pass (`model/fused/head.py`); None: on CUDA with
        `train.preset: fast`, where the model's head allows it."""
        self._config, self._ledger = config, ledger
        self.engine = ModelEngine(model, config.train, config.batch, ledger, num_updates, mesh=mesh)
        self._head = HeadSettings(
            temperature=config.rollout.temperature,
            softcap=model.logit_softcap,
            chunk=config.train.logprob_chunk,
            with_entropy_grad=config.algorithm.entropy_coefficient > 0.0,
            exact=model.is_exact,
        )
        if one_pass_head is None:
            one_pass_head = config.train.preset == "fast" and model.device.type == "cuda"
        plain_head = model.logit_softcap is None and model.head_bias_V is None and not model.is_exact
        self._logit_kernels = (
            logit_kernels_for(model.device.type)
            if one_pass_head and plain_head and self.engine.mesh.world_size == 1
            else None
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
        return self.engine.update(trained, "update_actor", *self._read_and_loss(denominator), metrics)

    def accumulate(self, samples: Sequence[TrainSample]) -> None:
        """The forward and backward passes of an update alone; their gradients stay with the optimiser."""
        denominator = denominator_of(samples, self._config.rollout.max_new_tokens)
        with self._ledger.span("update_actor") as span:
            self.engine.accumulate(samples, "update_actor", *self._read_and_loss(denominator), span)

    def _read_and_loss(self, denominator: Denominator) -> tuple[Read, LossOf[TrainSample]]:
        if self._logit_kernels is None:
            return self._read, partial(self._loss, denominator)
        return _read_hidden, partial(self._one_pass_loss, denominator)

    def rehearse(self, num_tokens: int, longest: int) -> bool:
        """Forward and backward of micro-batches of `num_tokens` made-up tokens on every rank, in samples of up to
        `longest`. False: memory ran out, and the budget is smaller now."""
        samples = made_up_samples(num_tokens, longest, self.engine.mesh, self.model.shape.vocab_size)
        denominator = denominator_of(samples, self._config.rollout.max_new_tokens)
        with self._ledger.span("setup", "token budget", absorb=True) as span:
            done = self.engine.accumulate(samples, "update_actor", *self._read_and_loss(denominator), span)
        return done is not None

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
        inputs = self._loss_inputs(members, denominator, logprob_R)
        output = policy_objective(inputs, entropy_R, self._reference(members), self._config.algorithm)
        return LossOutput(output.loss, pending=(output.pending, self._mismatch(members, logprob_R, inputs)))

    def _one_pass_loss(
        self, denominator: Denominator, values: tuple[Tensor, ...], members: Sequence[TrainSample]
    ) -> LossOutput:
        """The same loss; log-probs exist only chunk by chunk."""
        hidden_RE, targets_R = values
        assert self._logit_kernels is not None
        everything = self._loss_inputs(members, denominator, None)
        reference_R = self._reference(members)
        logprob_R = torch.empty(len(targets_R), device=hidden_RE.device)
        pending: list[PendingMetrics] = []

        def loss_of(rows: slice, logprob_C: Tensor, entropy_C: Tensor) -> Tensor:
            logprob_R[rows] = logprob_C.detach()
            reference_C = None if reference_R is None else reference_R[rows]
            inputs = everything.rows(rows, logprob_C)
            output = policy_objective(inputs, entropy_C, reference_C, self._config.algorithm)
            pending.append(output.pending)
            return output.loss

        loss = head_loss(
            hidden_RE,
            self.model.head_weight_VE,
            targets_R,
            self._head,
            self._chunks(members),
            loss_of,
            self._logit_kernels,
        )
        return LossOutput(loss, pending=(*pending, self._mismatch(members, logprob_R, everything)))

    def _chunks(self, members: Sequence[TrainSample]) -> list[slice]:
        """Rows per turn of the head: whole samples where the loss looks at a sample as a whole, else equal pieces."""
        sizes, limit = [len(m.response_ids) for m in members], self._head.chunk
        if self._config.algorithm.loss in SEQUENCE_LOSSES:
            return chunks_of_samples(sizes, limit)
        total = sum(sizes)
        return [slice(start, min(start + limit, total)) for start in range(0, total, limit)]

    def _loss_inputs(
        self, members: Sequence[TrainSample], denominator: Denominator, logprob_R: Tensor | None
    ) -> LossInputs:
        """Without log-probs, those and (where the current value serves as the old one) the old ones stay empty."""
        device = self.model.device
        sizes_N = np.array([len(m.response_ids) for m in members])
        sample_index_R = to_device(torch.from_numpy(np.repeat(np.arange(len(members)), sizes_N)), device)
        mask_R = _require(concatenate([m.loss_mask for m in members], device))
        tokens_N = to_device(torch.tensor([float(m.num_loss_tokens) for m in members]), device)
        old_R = concatenate([m.old_logprobs for m in members], device)
        if logprob_R is None:
            logprob_R = mask_R.new_empty(0)
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

    def _reference(self, members: Sequence[TrainSample]) -> Tensor | None:
        return concatenate([m.ref_logprobs for m in members], self.model.device)

    def _mismatch(
        self, members: Sequence[TrainSample], logprob_R: Tensor, inputs: LossInputs
    ) -> PendingMetrics:
        """How far the trainer's log-probs are from those the engine sampled with, in nats."""
        sampled_R = _require(concatenate([m.rollout_logprobs for m in members], self.model.device))
        difference_R = (logprob_R.detach().float() - sampled_R).abs().masked_fill(inputs.masked_out_T, 0.0)
        count = sum(m.num_loss_tokens for m in members)
        return PendingMetrics(
            torch.stack([difference_R.sum(dtype=torch.float64) / count, difference_R.max().double()]),
            lambda numbers: {
                "rollout/logprob_difference_mean": (numbers[0], count),
                "rollout/logprob_difference_max": (numbers[1], 1.0),
            },
        )


def made_up_samples(num_tokens: int, longest: int, mesh: RankMesh, vocab_size: int) -> list[TrainSample]:
    """Samples that fill one micro-batch of `num_tokens` tokens per device on every rank, each with a prompt of its
    own and an advantage, so that all of them are computed."""
    room = num_tokens * mesh.sp_size
    lengths = [longest] * (room // longest)
    if (rest := room % longest) >= 2:
        lengths.append(rest)
    found = []
    for index, length in enumerate(lengths * mesh.num_data):
        response = max(1, length - 2)  # nearly all of it goes through the head
        ones, zeros = np.ones(response, dtype=np.float32), np.zeros(response, dtype=np.float32)
        found.append(
            TrainSample(
                prompt_id=f"made up {index}",
                prompt_ids=(index % vocab_size, index // vocab_size % vocab_size)[: length - response],
                response_ids=(0,) * response,
                loss_mask=ones,
                advantages=ones,
                rollout_logprobs=zeros,
                old_logprobs=zeros,
                ref_logprobs=zeros,
            )
        )
    return found


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


def _read_hidden(model: CausalModel, inputs: ModelInputs) -> tuple[Tensor, ...]:
    """Hidden states that predict the response tokens, and these tokens."""
    hidden_TE = model.hidden(inputs.input_ids_BT, inputs.position_ids_BT, inputs.plan)
    return hidden_TE[inputs.source_R], inputs.targets_R
