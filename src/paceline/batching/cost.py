"""What a sequence costs to compute, from its length alone: linear plus quadratic."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class CostModel:
    """cost(L) = linear * L + quadratic * L^2, in any unit; only ratios matter to a plan.

    The default weighs length alone. `from_sizes` counts FLOPs; `fit` takes measured seconds.

    Raises:
        ValueError: a coefficient is negative or not finite, or both are zero.
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def __post_init__(self) -> None:
        if not (0.0 <= self.linear < np.inf and 0.0 <= self.quadratic < np.inf):
            raise ValueError(f"coefficients must be finite and at least 0: {self}")
        if self.linear == self.quadratic == 0.0:
            raise ValueError("a cost model needs a coefficient above 0")

    def cost(self, length: int, num_before: int = 0) -> float:
        """Cost of `length` tokens that continue `num_before` tokens computed elsewhere (a shared prefix).

        A piece costs what it adds: cost(a) + cost(b, a) = cost(a + b), however a sequence is cut.
        """
        end = num_before + length
        return self.linear * length + self.quadratic * (end * end - num_before * num_before)

    @classmethod
    def from_sizes(
        cls, matmul_parameters: int, num_layers: int, num_heads: int, head_dim: int
    ) -> "CostModel":
        """Forward FLOPs: 2 per matmul parameter and token, and causal attention's 2 * layers * heads * dim * L^2."""
        return cls(2.0 * matmul_parameters, 2.0 * num_layers * num_heads * head_dim)

    @classmethod
    def fit(cls, batches: Sequence[Sequence[int]], seconds: Sequence[float]) -> "CostModel":
        """Least squares with non-negative coefficients over measured batches (lengths of each, its seconds).

        Raises:
            ValueError: no batches, not one time for each, or a batch without tokens or without a positive time.
        """
        if not batches or len(batches) != len(seconds):
            raise ValueError(f"{len(batches)} batches and {len(seconds)} times cannot be fitted")
        sums = np.array([[sum(b), sum(n * n for n in b)] for b in batches], dtype=np.float64)
        times = np.asarray(seconds, dtype=np.float64)
        if not (sums > 0).all() or not (np.isfinite(times) & (times > 0)).all():
            raise ValueError("every batch to fit needs at least one token and a positive time")
        scales = sums.max(
            axis=0
        )  # squares are larger by a factor of the length; the fit sees both columns alike
        both = np.linalg.lstsq(sums / scales, times, rcond=None)[0] / scales
        if (both >= 0).all():
            return cls(float(both[0]), float(both[1]))
        # a negative coefficient is noise; the best non-negative pair then lies on a boundary, one of two single terms
        alone = [float(column @ times / (column @ column)) for column in sums.T]
        errors = [float(np.sum((column * c - times) ** 2)) for column, c in zip(sums.T, alone, strict=True)]
        return cls(alone[0], 0.0) if errors[0] <= errors[1] else cls(0.0, alone[1])
