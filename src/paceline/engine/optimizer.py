"""AdamW on float32 masters, whatever the working weights are, with non-finite updates skipped whole.

A bfloat16 weight near 1 moves in steps of 1/256 (below 1) and cannot take an update of 6e-4; the masters can. For
float32 models the masters *are* the weights and nothing is held twice.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.config.schema import TrainSection
from paceline.engine.lr_schedule import learning_rate


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """What one `step` did. `grad_norm` is measured before clipping and may be NaN; then `skipped` is true."""

    grad_norm: float
    lr: float
    skipped: bool


class TooManySkippedUpdatesError(RuntimeError):
    """The gradient stayed non-finite for as many updates in a row as `train.max_skipped_updates` allows."""


class MasterAdamW:
    """Decoupled-weight-decay Adam (Loshchilov and Hutter 2019) over float32 masters and float32 gradient sums.

    Weight decay acts on matrices only (parameters of two or more dimensions), not on norms and biases.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: TrainSection, num_updates: int
    ) -> None:
        self._settings, self._num_updates = settings, num_updates
        self._working = {name: p for name, p in parameters.items() if p.requires_grad}
        self._masters = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float(), requires_grad=False)
            for name, p in self._working.items()
        }
        self._separate = [name for name, p in self._working.items() if self._masters[name] is not p]
        for name in self._separate:
            _collect_gradient_in_float32(self._working[name], self._masters[name])
        decayed = [p for p in self._masters.values() if p.dim() >= 2]
        plain = [p for p in self._masters.values() if p.dim() < 2]
        self._adam = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        self.update_index = 0
        self.consecutive_skips = 0

    def zero_grad(self) -> None:
        """Forgets accumulated gradients."""
        for master in self._masters.values():
            master.grad = None

    def step(self) -> UpdateOutcome:
        """Applies the accumulated gradient once, or skips the update if its norm is not finite.

        A skipped update leaves masters, moments and working weights bit-unchanged; the learning-rate schedule moves
        on, because the data of this update is spent.

        Raises:
            TooManySkippedUpdatesError: `train.max_skipped_updates` skips in a row.
        """
        gradients = [m.grad for m in self._masters.values() if m.grad is not None]
        grad_norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        lr = learning_rate(self._settings, self.update_index, self._num_updates)
        self.update_index += 1
        if not math.isfinite(grad_norm):
            return self._skip(grad_norm, lr)
        self.consecutive_skips = 0
        self._fill_missing_gradients()
        limit = self._settings.grad_clip
        if limit and grad_norm > limit:
            torch._foreach_mul_(gradients, limit / (grad_norm + 1e-6))
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self._publish()
        self.zero_grad()
        return UpdateOutcome(grad_norm, lr, skipped=False)

    def _skip(self, grad_norm: float, lr: float) -> UpdateOutcome:
        self.zero_grad()
        self.consecutive_skips += 1
        if self.consecutive_skips >= self._settings.max_skipped_updates:
            raise TooManySkippedUpdatesError(
                f"the gradient norm was {grad_norm} in {self.consecutive_skips} updates in a row "
                "(train.max_skipped_updates); the weights are those before the first of them"
            )
        return UpdateOutcome(grad_norm, lr, skipped=True)

    def _fill_missing_gradients(self) -> None:
        """A parameter no token reached has gradient zero, not none: moments and decay still act on it."""
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    @torch.no_grad()
    def _publish(self) -> None:
        """Copies masters into the working weights."""
        if self._separate:
            torch._foreach_copy_(
                [self._working[name] for name in self._separate],
                [self._masters[name] for name in self._separate],
            )

    def masters(self) -> dict[str, Tensor]:
        """Float32 masters by parameter name."""
        return {name: master.detach() for name, master in self._masters.items()}

    def moments(self) -> dict[str, Tensor]:
        """Adam's moments, `{name}.exp_avg` and `{name}.exp_avg_sq`; empty before the first update."""
        found: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            state = self._adam.state.get(master)
            if state:
                found[f"{name}.exp_avg"] = state["exp_avg"]
                found[f"{name}.exp_avg_sq"] = state["exp_avg_sq"]
        return found

    def state(self) -> dict[str, int]:
        """Counters that belong to the masters and moments."""
        steps = {int(state["step"]) for state in self._adam.state.values()} or {0}
        (num_applied,) = steps
        return {
            "update_index": self.update_index,
            "num_applied": num_applied,
            "consecutive_skips": self.consecutive_skips,
        }

    @torch.no_grad()
    def load(
        self, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor], state: Mapping[str, int]
    ) -> None:
        """Restores everything bit by bit and publishes the masters to the working weights.

        Raises:
            KeyError: a parameter of this model is missing from the checkpoint.
        """
        self.update_index = state["update_index"]
        self.consecutive_skips = state["consecutive_skips"]
        for name, master in self._masters.items():
            master.copy_(masters[name])
            if state["num_applied"]:
                self._adam.state[master] = {
                    "step": torch.tensor(float(state["num_applied"]), device=master.device),
                    "exp_avg": moments[f"{name}.exp_avg"].to(master.device, copy=True),
                    "exp_avg_sq": moments[f"{name}.exp_avg_sq"].to(master.device, copy=True),
                }
        self._publish()


def _collect_gradient_in_float32(working: nn.Parameter, master: nn.Parameter) -> None:
    """Adds every micro-batch's gradient to a float32 sum and frees the working dtype's gradient at once."""

    def collect(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    working.register_post_accumulate_grad_hook(collect)
