"""What a sequence costs to compute, from its length alone: linear plus quadratic."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class CostModel:
    """cost(L) = linear * L + quadratic * L^2, in any unit; only ratios matter to a plan.

    The default weighs length alone. `from_sizes` counts FLOPs; `fit` takes measured seconds.
    """

    linear: float = 1.0
    quadratic: float = 0.0

    def cost(self, length: int) -> float:
        """Cost of one sequence of `length` tokens."""
        return self.linear * length + self.quadratic * length * length

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
            ValueError: no batches, or as many seconds as batches are not given.
        """
        if not batches or len(batches) != len(seconds):
            raise ValueError(f"{len(batches)} batches and {len(seconds)} times cannot be fitted")
        sums = np.array([[sum(b), sum(n * n for n in b)] for b in batches], dtype=np.float64)
        times = np.asarray(seconds, dtype=np.float64)
        both = np.linalg.lstsq(sums, times, rcond=None)[0]
        if (both >= 0).all():
            return cls(float(both[0]), float(both[1]))
        # a negative coefficient is noise: the better of the two single-term fits
        alone = [max(0.0, float(column @ times / (column @ column))) for column in sums.T]
        errors = [float(np.sum((column * c - times) ** 2)) for column, c in zip(sums.T, alone, strict=True)]
        return cls(alone[0], 0.0) if errors[0] <= errors[1] else cls(0.0, alone[1])
