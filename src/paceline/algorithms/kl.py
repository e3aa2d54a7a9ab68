"""Per-token estimates of the KL to a reference policy. Shapes: T response tokens."""

from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FloatArray = npt.NDArray[np.floating]
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


def kl_penalties(
    logprobs_L: FloatArray,
    reference_logprobs_L: FloatArray,
    loss_mask_L: FloatArray,
    estimator: KlEstimator,
    coefficient: float,
    cap: float,
) -> FloatArray:
    """What to subtract from each token's reward: coefficient * KL estimate at loss tokens, 0 at the others; [L].

    `logprobs_L` are those of the policy that sampled; L response tokens, one entry each.
    """
    kl_L = kl_estimate(
        estimator, torch.from_numpy(logprobs_L), torch.from_numpy(reference_logprobs_L), cap
    ).numpy()
    return coefficient * np.where(loss_mask_L > 0, kl_L.astype(np.float64), 0.0)
