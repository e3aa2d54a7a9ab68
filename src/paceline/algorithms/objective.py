"""A micro-batch's part of the objective: policy loss, KL and entropy, and what is worth recording of them.

Shapes: T response tokens of a micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.algorithms.kl import kl_estimate
from paceline.algorithms.losses import LOSSES, LossInputs, LossTerms
from paceline.config.schema import AlgorithmSection

Metrics = dict[str, tuple[float, float]]
"""Name to (value, weight)."""


@dataclass(frozen=True, slots=True)
class PendingMetrics:
    """Numbers that are still being computed on the device: asking for them makes the host wait, so ask last."""

    values: Tensor
    read: Callable[[Sequence[float]], Metrics]

    def resolve(self) -> Metrics:
        """The metrics, in one transfer."""
        return self.read(self.values.tolist())


@dataclass(frozen=True, slots=True)
class ObjectiveOutput:
    """The scalar to call backward on, and metrics as name to (value, weight).

    `loss` is a partial sum: those of all micro-batches and ranks add up to the mini-batch's loss. So do the `loss/`
    metrics (weight 1), coefficients and signs included: loss/total = loss/policy + loss/kl + loss/entropy. The other
    metrics are means over this micro-batch's loss tokens (`ratio/max`: their maximum), weighted by the number of these
    tokens, and absent when there are none.
    """

    loss: Tensor
    pending: PendingMetrics

    @property
    def metrics(self) -> Metrics:
        """The metrics now; waits for the device."""
        return self.pending.resolve()


def policy_objective(
    inputs: LossInputs, entropy_T: Tensor, reference_logprob_T: Tensor | None, settings: AlgorithmSection
) -> ObjectiveOutput:
    """sum over T of weight * (policy loss + kl_coefficient * KL - entropy_coefficient * entropy).

    The KL term is there with a reference, a coefficient and `kl_placement: loss`; a reference without them is only
    measured (`kl/reference`). `entropy_T` needs a graph only with an entropy coefficient. Raises `ValueError` when the
    settings ask for a KL and there is no reference, or hold no preset's values.
    """
    policy = _policy_terms(inputs, settings)
    out_T = inputs.masked_out_T
    sums = {"loss/policy": (inputs.weight_T * policy.loss_T).sum()}
    token_means = _policy_means(inputs, policy, settings)
    entropy_T = entropy_T.masked_fill(out_T, 0.0)
    token_means["entropy"] = entropy_T.detach()
    if settings.entropy_coefficient > 0:
        sums["loss/entropy"] = -settings.entropy_coefficient * (inputs.weight_T * entropy_T).sum()
    if reference_logprob_T is not None:
        kl_T = _masked_kl(inputs.logprob_T, reference_logprob_T, out_T, settings)
        token_means["kl/reference"] = kl_T.detach()
        token_means["kl/capped_fraction"] = (kl_T.detach().abs() >= settings.kl_cap).to(kl_T.dtype)
        if _kl_is_in_the_loss(settings):
            sums["loss/kl"] = settings.kl_coefficient * (inputs.weight_T * kl_T).sum()
    elif _kl_is_in_the_loss(settings):
        raise ValueError(
            "algorithm.kl_coefficient asks for a KL in the loss, and no reference log-probs are given"
        )
    loss = torch.stack(list(sums.values())).sum()
    return ObjectiveOutput(
        loss, _pending_metrics({"loss/total": loss, **sums}, token_means, policy.ratio_T, out_T)
    )


def _policy_terms(inputs: LossInputs, settings: AlgorithmSection) -> LossTerms:
    if settings.loss is None:
        raise ValueError("algorithm.loss must be set: load_config applies the preset")
    return LOSSES[settings.loss](inputs, settings)


def _kl_is_in_the_loss(settings: AlgorithmSection) -> bool:
    return settings.kl_coefficient > 0 and settings.kl_placement == "loss"


def _masked_kl(
    logprob_T: Tensor, reference_logprob_T: Tensor, out_T: Tensor, settings: AlgorithmSection
) -> Tensor:
    # masked before the estimate: an infinite log-prob at a token of mask 0 would leave 0 * inf in the backward pass
    return kl_estimate(
        settings.kl_estimator,
        logprob_T.masked_fill(out_T, 0.0),
        reference_logprob_T.masked_fill(out_T, 0.0),
        settings.kl_cap,
    )


def _policy_means(inputs: LossInputs, policy: LossTerms, settings: AlgorithmSection) -> dict[str, Tensor]:
    """Per-token values, 0 at mask 0, whose means over loss tokens are reported."""
    out_T = inputs.masked_out_T
    # tokens were sampled from the old policy, so with it in the policy's place k3 estimates KL(old || new)
    old_T = inputs.old_logprob_T.detach().masked_fill(out_T, 0.0)
    new_T = inputs.logprob_T.detach().masked_fill(out_T, 0.0)
    return {
        "kl/old": kl_estimate("k3", old_T, new_T, settings.kl_cap),
        "clip_fraction": (policy.clipped_T & ~out_T).to(policy.ratio_T.dtype),
        "ratio/mean": policy.ratio_T.masked_fill(out_T, 0.0),
    }


def _pending_metrics(
    sums: dict[str, Tensor], token_means: dict[str, Tensor], ratio_T: Tensor, out_T: Tensor
) -> PendingMetrics:
    # ratios are positive, so a zero stands for no loss token at all, where max would have nothing to look at
    highest = torch.cat([ratio_T.masked_fill(out_T, 0.0), ratio_T.new_zeros(1)]).max()
    scalars = [*sums.values(), *(value_T.sum() for value_T in token_means.values()), highest, (~out_T).sum()]

    def read(numbers: Sequence[float]) -> Metrics:
        *values, max_ratio, count = numbers
        metrics = {name: (value, 1.0) for name, value in zip(sums, values, strict=False)}
        if count:
            totals = values[len(sums) :]
            metrics |= {name: (total / count, count) for name, total in zip(token_means, totals, strict=True)}
            metrics["ratio/max"] = (max_ratio, count)
        return metrics

    return PendingMetrics(torch.stack([scalar.detach().double() for scalar in scalars]), read)
