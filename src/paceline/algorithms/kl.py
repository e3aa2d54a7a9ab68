"""Per-token estimates of the KL to a reference policy. Shapes: T response tokens, N samples."""

from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]

_MAX_EXPONENT = 80.0  # exp overflows float32 from about 89


def kl_estimate(estimator: KlEstimator, logprob_T: Tensor, reference_logprob_T: Tensor, cap: float) -> Tensor:
    """Estimate of KL(policy || reference) at tokens sampled from the policy, in nats, [T].

    With d = reference - policy log-prob (Schulman 2020, "Approximating KL Divergence"):
        k1 = -d,  k2 = d^2 / 2,  k3 = exp(d) - 1 - d
    The value is at most `cap` (k1, which can be negative, at least -`cap`). d is bounded before anything grows with
    it, so the gradient is finite at any d: that of the estimate below the cap, 0 at it. NaN stays NaN.
    """
    d_T = reference_logprob_T.detach() - logprob_T
    match estimator:
        case "k1":
            return (-d_T).clamp(-cap, cap)
        case "k2":
            return (d_T.clamp(-(cap + 1.0), cap + 1.0).square() / 2).clamp(max=cap)
        case "k3":
            # at d = -(cap + 1) and at d = cap + 1 the estimate is no less than cap, so bounding d there changes nothing
            d_T = d_T.clamp(-(cap + 1.0), min(cap + 1.0, _MAX_EXPONENT))
            return (torch.expm1(d_T) - d_T).clamp(max=cap)
    raise ValueError(f"there is no KL estimator named {estimator!r}; there are k1, k2 and k3")


def kl_in_reward(
    estimator: KlEstimator,
    logprob_T: Tensor,
    reference_logprob_T: Tensor,
    loss_mask_T: Tensor,
    sample_index_T: Tensor,
    num_samples: int,
    coefficient: float,
    cap: float,
) -> Tensor:
    """What to subtract from each sample's reward: coefficient * sum of its loss tokens' KL estimates, [N], detached.

    `logprob_T` are those of the policy that sampled; `sample_index_T` is the sample a token belongs to.
    """
    kl_T = kl_estimate(estimator, logprob_T.detach(), reference_logprob_T, cap)
    penalty_T = (coefficient * kl_T).masked_fill(loss_mask_T == 0, 0.0)
    return penalty_T.new_zeros(num_samples).index_add_(0, sample_index_T, penalty_T)
