"""What a policy loss is given and what it returns. Shapes: T response tokens of a micro-batch, N its samples."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.config.schema import AlgorithmSection

MAX_LOG_RATIO = 40.0
"""Bound in nats on a log-ratio before exp. Beyond it the two policies share nothing; exp would overflow float32 from
about 89, and its infinite gradient times a clipped branch's zero would be NaN. `ratio/max` shows when it acts."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Packed response tokens of a micro-batch; every tensor is [T].

    Log-probs are in nats; only `logprob_T` carries a gradient. `weight_T` comes from `aggregation_weights`.
    `loss_mask_T` is 1 where a token is trained on. `sample_index_T` is the sample, 0 to `num_samples` - 1, a token
    belongs to. Log-probs at tokens of mask 0 have no influence, even if they are not finite.
    """

    logprob_T: Tensor
    old_logprob_T: Tensor
    advantage_T: Tensor
    weight_T: Tensor
    loss_mask_T: Tensor
    sample_index_T: Tensor
    num_samples: int

    @property
    def masked_out_T(self) -> Tensor:
        """True where a token is not trained on."""
        return self.loss_mask_T == 0

    def rows(self, rows: slice, logprob_C: Tensor) -> "LossInputs":
        """The same for some of the tokens, with their log-probs; these serve as the old ones where there are none."""
        return LossInputs(
            logprob_T=logprob_C,
            old_logprob_T=self.old_logprob_T[rows] if len(self.old_logprob_T) else logprob_C.detach(),
            advantage_T=self.advantage_T[rows],
            weight_T=self.weight_T[rows],
            loss_mask_T=self.loss_mask_T[rows],
            sample_index_T=self.sample_index_T[rows],
            num_samples=self.num_samples,
        )

    @property
    def log_ratio_T(self) -> Tensor:
        """log(new / old) of every token; 0 where it is not trained on."""
        return (self.logprob_T - self.old_logprob_T.detach()).masked_fill(self.masked_out_T, 0.0)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Per-token loss (with its graph) and, detached, the importance ratio and where clipping cut the update."""

    loss_T: Tensor
    ratio_T: Tensor
    clipped_T: Tensor


PolicyLoss = Callable[[LossInputs, AlgorithmSection], LossTerms]


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio bounded to `MAX_LOG_RATIO`; gradient 0 beyond it, never infinite. NaN stays NaN."""
    return torch.exp(log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def clip_range(settings: AlgorithmSection) -> tuple[float, float]:
    """Least and greatest ratio. Raises `ValueError` when the preset has not been applied."""
    if settings.clip_low is None or settings.clip_high is None:
        raise ValueError(
            "algorithm.clip_low and algorithm.clip_high must be set: load_config applies the preset"
        )
    return 1.0 - settings.clip_low, 1.0 + settings.clip_high


def clipped_surrogate(ratio_T: Tensor, advantage_T: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """min(ratio * A, clip(ratio) * A), and where the clip changed that minimum (Schulman et al. 2017, eq. 7)."""
    raw_T = ratio_T * advantage_T
    bounded_T = ratio_T.clamp(low, high) * advantage_T
    return torch.minimum(raw_T, bounded_T), (bounded_T < raw_T).detach()
