"""AdamW in one pass over memory: gradient, master, moments and working weight of a parameter in one kernel.

The kernel reads the gradient norm on the device and writes nothing when it is not finite, so a step is launched
without waiting for the backward pass to end.
"""

import importlib
from collections.abc import Iterable, Mapping
from types import ModuleType

import torch
from torch import Tensor, nn

from paceline.config.schema import TrainSection
from paceline.model.triton_support import has_triton


def fused_adam(masters: Mapping[str, Tensor], settings: TrainSection) -> "FusedAdam | None":
    """The fused optimiser where it applies: CUDA with Triton, `train.preset: fast`; the parameters are whole."""
    on_cuda = bool(masters) and all(p.is_cuda for p in masters.values())
    return FusedAdam(masters, settings) if on_cuda and settings.preset == "fast" and has_triton() else None


class FusedAdam:
    """Moments by parameter name, and the launches. `num_applied` is counted by the owner, which knows the outcome."""

    def __init__(self, masters: Mapping[str, Tensor], settings: TrainSection) -> None:
        self._masters, self._settings = masters, settings
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        self._kernels: ModuleType = importlib.import_module("paceline.engine.triton_adam")  # needs Triton
        self.num_applied = 0

    @torch.no_grad()
    def apply(
        self,
        gradients: Mapping[str, Tensor],
        working: Mapping[str, nn.Parameter],
        norm: Tensor,
        lr: float,
        names: Iterable[str] | None = None,
    ) -> None:
        """Update number `num_applied` + 1 on every parameter (on `names` alone), unless `norm` is not finite."""
        settings = self._settings
        update = self.num_applied + 1
        beta_1, beta_2 = settings.betas
        for name in self._masters if names is None else names:
            master = self._masters[name]
            if name not in self._moments:
                self._moments[name] = torch.zeros_like(master), torch.zeros_like(master)
            # a parameter no token reached has gradient zero, not none: moments and decay still act on it
            gradient = gradients.get(name)
            self._kernels.launch(
                master,
                working[name] if working[name] is not master else None,
                torch.zeros_like(master) if gradient is None else gradient,
                *self._moments[name],
                norm,
                lr=lr,
                betas=settings.betas,
                eps=settings.eps,
                weight_decay=settings.weight_decay if master.dim() >= 2 else 0.0,
                corrections=(1.0 - beta_1**update, (1.0 - beta_2**update) ** 0.5),
                clip=settings.grad_clip,
            )

    def moments(self, names: Iterable[str]) -> dict[str, Tensor]:
        """`{name}.exp_avg` and `{name}.exp_avg_sq`, as far as there are any."""
        return {
            f"{name}.{kind}": moment
            for name in names
            if name in self._moments
            for kind, moment in zip(("exp_avg", "exp_avg_sq"), self._moments[name], strict=True)
        }

    def take_moments(self, name: str, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Those of a checkpoint, which are its own from now on."""
        self._moments[name] = exp_avg, exp_avg_sq

    def forget_moments(self, name: str) -> None:
        """As before the first update."""
        self._moments.pop(name, None)
