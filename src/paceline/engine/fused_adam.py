"""AdamW in one pass over memory: gradient, master, moments and working weight of a parameter in one kernel.

The kernel reads the gradient norm on the device and writes nothing when it is not finite, so a step is launched
without waiting for the backward pass to end.
"""

import importlib
from collections.abc import Mapping
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
        self, gradients: Mapping[str, Tensor], working: Mapping[str, nn.Parameter], norm: Tensor, lr: float
    ) -> None:
        """Update number `num_applied` + 1 on every parameter, unless `norm` is not finite."""
        settings = self._settings
        update = self.num_applied + 1
        beta_1, beta_2 = settings.betas
        for name, master in self._masters.items():
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

    def moments(self) -> dict[str, Tensor]:
        """`{name}.exp_avg` and `{name}.exp_avg_sq`; empty before the first update."""
        if self.num_applied == 0:
            return {}
        return {
            f"{name}.{kind}": moment
            for name, pair in self._moments.items()
            for kind, moment in zip(("exp_avg", "exp_avg_sq"), pair, strict=True)
        }

    def load(self, moments: Mapping[str, Tensor], num_applied: int) -> None:
        """Takes over the moments of a checkpoint."""
        self.num_applied = num_applied
        self._moments = {}
        for name, master in self._masters.items() if num_applied else ():
            self._moments[name] = (
                moments[f"{name}.exp_avg"].to(master.device, copy=True),
                moments[f"{name}.exp_avg_sq"].to(master.device, copy=True),
            )
