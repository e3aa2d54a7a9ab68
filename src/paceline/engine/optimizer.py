"""AdamW on float32 masters, whatever the working weights are, with non-finite updates skipped whole.

A bfloat16 weight near 1 moves in steps of 1/256 (below 1) and cannot take an update of 6e-4; the masters can. For
float32 models the masters *are* the weights and nothing is held twice. So it is with parameters sharded over ranks:
their shards are float32, and each rank's optimiser works on the plain tensors of its own.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.config.schema import TrainSection
from paceline.engine.fused_adam import fused_adam
from paceline.engine.host_storage import HostStorage, groups_by_bytes
from paceline.engine.lr_schedule import learning_rate
from paceline.engine.mesh import RankMesh
from paceline.engine.shards import local_part, num_copies, part_of, spread_like

MOMENTS = ("exp_avg", "exp_avg_sq")

OPTIMIZER_GROUP_BYTES = 2**28
"""Masters that visit the device at a time where the optimiser's states are on the host."""


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
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: TrainSection,
        num_updates: int,
        *,
        mesh: RankMesh | None = None,
        partly_seen: AbstractSet[str] = frozenset(),
        group_bytes: int = OPTIMIZER_GROUP_BYTES,
    ) -> None:
        """`partly_seen`: parameters whose gradients are partial sums over the mesh's tensor-parallel ranks.

        `group_bytes`: with `train.optimizer_offload`, masters that visit the device at a time (twice, as the next ones
        are fetched meanwhile), and as many bytes of each moment.
        """
        self._settings, self._num_updates = settings, num_updates
        self._mesh, self._partly_seen = mesh or RankMesh.single(), partly_seen
        self._working = {name: p for name, p in parameters.items() if p.requires_grad}
        self._masters: dict[str, Tensor] = {name: _master_of(p) for name, p in self._working.items()}
        self._sharded = [name for name, p in self._working.items() if isinstance(p, DTensor)]
        self._separate = [
            name
            for name, p in self._working.items()
            if p.dtype != torch.float32 and not isinstance(p, DTensor)
        ]
        self._collected: dict[str, Tensor] = {}
        for name in self._separate:
            self._collect(name)
        self._fused = None if self._sharded else fused_adam(self._masters, settings)
        self._adam = None if self._fused else _torch_adam(self._masters, settings)
        self.update_index = 0
        self.consecutive_skips = 0
        self._host: HostStorage | None = None
        self._groups = [list(self._masters)]
        if settings.optimizer_offload and self._masters:
            self._host = HostStorage(next(iter(self._masters.values())).device)
            sizes = {name: master.nbytes for name, master in self._masters.items()}
            self._groups = groups_by_bytes(sizes, group_bytes)
            self._host.put_away(self._states(self._separate))

    def plan(self, num_updates: int) -> None:
        """The updates there will be in all, where they are not those of the constructor: they shape the learning
        rate."""
        self._num_updates = num_updates

    def _collect(self, name: str) -> None:
        """Takes every micro-batch's gradient of a working weight at once; a second one makes the sum float32.

        A gradient that came in one piece stays in the working dtype: its float32 copy would hold the same numbers.
        """

        collected, several_ranks = self._collected, self._mesh.world_size > 1

        def collect(parameter: Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            assert gradient is not None
            before = collected.get(name)
            if before is not None:
                total = before if before.dtype == torch.float32 else before.float()
                collected[name] = total.add_(gradient)
            elif several_ranks:  # it will be summed over ranks, which bfloat16 would round
                collected[name] = gradient.float()
            else:
                collected[name] = gradient

        # the hook must not hold the optimiser: a parameter that held its owner would never be freed
        self._working[name].register_post_accumulate_grad_hook(collect)

    def zero_grad(self) -> None:
        """Forgets accumulated gradients."""
        self._collected.clear()
        for name, master in self._masters.items():
            master.grad = None
            self._working[name].grad = None

    def step(self) -> UpdateOutcome:
        """Applies the accumulated gradient once, or skips the update if its norm is not finite.

        A skipped update leaves masters, moments and working weights bit-unchanged; the learning-rate schedule moves
        on, because the data of this update is spent.

        Raises:
            TooManySkippedUpdatesError: `train.max_skipped_updates` skips in a row.
        """
        self._take_sharded_gradients()
        gradients = {
            name: gradient
            for name, master in self._masters.items()
            if (gradient := self._collected.get(name, master.grad)) is not None
        }
        norm = self._gradient_norm(gradients)
        lr = learning_rate(self._settings, self.update_index, self._num_updates)
        self.update_index += 1
        if self._fused is not None and self._host is None:
            # decides on the device whether to skip, so the host need not wait here
            self._fused.apply(gradients, self._working, norm, lr)
        grad_norm = float(norm)
        if not math.isfinite(grad_norm):
            return self._skip(grad_norm, lr)
        self.consecutive_skips = 0
        if self._fused is None:
            self._on_device(partial(self._apply_with_torch, gradients, grad_norm, lr))
        elif self._host is not None:
            self._on_device(partial(self._fused.apply, gradients, self._working, norm, lr))
        if self._fused is not None:
            self._fused.num_applied += 1
        self.zero_grad()
        return UpdateOutcome(grad_norm, lr, skipped=False)

    def _on_device(self, work: Callable[[Sequence[str]], None]) -> None:
        """Does `work` on all names, group by group where their states are on the host in between."""
        if self._host is None:
            work(list(self._masters))
        else:
            self._host.visit(self._groups, self._states, work)

    def _states(self, names: Sequence[str]) -> dict[str, Tensor]:
        """What `train.optimizer_offload` keeps on the host: masters that are not the weights themselves, moments."""
        separate = set(self._separate)
        found = {name: self._masters[name] for name in names if name in separate}
        return found | self._moments(names)

    def _apply_with_torch(
        self, gradients: Mapping[str, Tensor], grad_norm: float, lr: float, names: Sequence[str]
    ) -> None:
        assert self._adam is not None
        masters = [self._masters[name] for name in names]
        for master in self._masters.values():
            master.grad = None  # the others' turn comes or has been
        for name, master in zip(names, masters, strict=True):
            # a parameter no token reached has gradient zero, not none: moments and decay still act on it
            found = gradients.get(name)
            master.grad = torch.zeros_like(master) if found is None else found.to(master.dtype)
        limit = self._settings.grad_clip
        if limit and grad_norm > limit:
            scaled = [master.grad for master in masters if master.grad is not None]
            torch._foreach_mul_(scaled, limit / (grad_norm + 1e-6))
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        self._publish(names)

    def _take_sharded_gradients(self) -> None:
        """Moves the gradients of sharded parameters to their masters, summed over ranks where they are partial."""
        for name in self._sharded:
            gradient = self._working[name].grad
            if gradient is not None:
                self._masters[name].grad = local_part(gradient)
                self._working[name].grad = None
        if self._mesh.tp_group is not None:
            for name in sorted(self._partly_seen & self._masters.keys()):  # frozen ones have no gradient
                if (gradient := self._collected.get(name, self._masters[name].grad)) is not None:
                    dist.all_reduce(gradient, group=self._mesh.tp_group)

    def _gradient_norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Norm over all parameters, float32, each counted once however many ranks hold it; the same on every rank."""
        if not gradients:
            return torch.zeros((), device=next(iter(self._masters.values())).device)
        if self._mesh.world_size == 1:
            return _total_norm(list(gradients.values()))
        copies = [num_copies(self._working[name], self._mesh.world_size) for name in gradients]
        squares = torch.stack(torch._foreach_norm(list(gradients.values()))).square()
        total = (squares / torch.tensor(copies, dtype=squares.dtype, device=squares.device)).sum()
        return self._mesh.sum(total).sqrt()

    def _skip(self, grad_norm: float, lr: float) -> UpdateOutcome:
        self.zero_grad()
        self.consecutive_skips += 1
        if self.consecutive_skips >= self._settings.max_skipped_updates:
            raise TooManySkippedUpdatesError(
                f"the gradient norm was {grad_norm} in {self.consecutive_skips} updates in a row "
                "(train.max_skipped_updates); the weights are those before the first of them"
            )
        return UpdateOutcome(grad_norm, lr, skipped=True)

    @torch.no_grad()
    def _publish(self, names: Sequence[str]) -> None:
        """Copies masters into the working weights."""
        separate = set(self._separate)
        copied = [name for name in names if name in separate]
        if copied:
            torch._foreach_copy_([self._working[n] for n in copied], [self._masters[n] for n in copied])

    def masters(self) -> dict[str, Tensor]:
        """Float32 masters by parameter name; DTensors where the parameters are divided over ranks."""
        return {
            name: spread_like(self._value(name, master.detach()), self._working[name])
            for name, master in self._masters.items()
        }

    def moments(self) -> dict[str, Tensor]:
        """Adam's moments, `{name}.exp_avg` and `{name}.exp_avg_sq`, as the masters; empty before the first update."""
        if self.num_applied == 0:
            return {}
        return {
            key: spread_like(self._value(key, moment), self._working[key.rpartition(".")[0]])
            for key, moment in self._moments(list(self._masters)).items()
        }

    def _moments(self, names: Sequence[str]) -> dict[str, Tensor]:
        """The moments there are, as the optimiser holds them."""
        if self._fused is not None:
            return self._fused.moments(names)
        assert self._adam is not None
        return {
            f"{name}.{moment}": state[moment]
            for name in names
            if (state := self._adam.state.get(self._masters[name]))
            for moment in MOMENTS
        }

    def _value(self, key: str, tensor: Tensor) -> Tensor:
        """The tensor, or its values on the host while they are there."""
        away = self._host is not None and tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0
        return self._host.value(key) if away and self._host is not None else tensor

    def bytes_to_come(self) -> int:
        """What the first update will allocate for good: the moments, while they are not there yet."""
        return (
            0
            if self._host is not None or self.moments()
            else 2 * sum(master.nbytes for master in self._masters.values())
        )

    @property
    def num_applied(self) -> int:
        """Updates that were not skipped."""
        if self._fused is not None:
            return self._fused.num_applied
        assert self._adam is not None
        steps = {int(state["step"]) for state in self._adam.state.values()} or {0}
        (num_applied,) = steps
        return num_applied

    def state(self) -> dict[str, int]:
        """Counters that belong to the masters and moments."""
        return {
            "update_index": self.update_index,
            "num_applied": self.num_applied,
            "consecutive_skips": self.consecutive_skips,
        }

    @torch.no_grad()
    def load(
        self, masters: Mapping[str, Tensor], moments: Mapping[str, Tensor], state: Mapping[str, int]
    ) -> None:
        """Restores everything bit by bit and publishes the masters to the working weights.

        Tensors are whole, and each rank takes its part, or DTensors divided as the masters are.

        Raises:
            KeyError: a parameter of this model is missing from the checkpoint.
        """
        self.update_index = state["update_index"]
        self.consecutive_skips = state["consecutive_skips"]
        if self._fused is not None:
            self._fused.num_applied = state["num_applied"]
        self._on_device(partial(self._load, masters, moments, state["num_applied"]))

    def _load(
        self,
        masters: Mapping[str, Tensor],
        moments: Mapping[str, Tensor],
        num_applied: int,
        names: Sequence[str],
    ) -> None:
        for name in names:
            master, like = self._masters[name], self._working[name]
            master.copy_(part_of(masters[name], like))
            if not num_applied:
                self._forget_moments(name)
                continue
            found = {
                moment: part_of(moments[f"{name}.{moment}"], like).to(master.device, copy=True)
                for moment in MOMENTS
            }
            if self._fused is not None:
                self._fused.take_moments(name, found["exp_avg"], found["exp_avg_sq"])
            else:
                assert self._adam is not None
                step = torch.tensor(float(num_applied), device=master.device)
                self._adam.state[master] = {"step": step, **found}
        self._publish(names)

    def _forget_moments(self, name: str) -> None:
        if self._fused is not None:
            self._fused.forget_moments(name)
        elif self._adam is not None:
            self._adam.state.pop(self._masters[name], None)


def _master_of(parameter: nn.Parameter) -> Tensor:
    """The float32 tensor the optimiser works on: the parameter, its own shard, or a copy."""
    if isinstance(parameter, DTensor):
        assert parameter.dtype == torch.float32, (
            "shards of trained parameters are float32 (engine/sharding.py)"
        )
        return local_part(parameter)
    if parameter.dtype == torch.float32:
        return parameter
    return nn.Parameter(parameter.detach().float(), requires_grad=False)


def _torch_adam(masters: Mapping[str, Tensor], settings: TrainSection) -> torch.optim.AdamW:
    decayed = [p for p in masters.values() if p.dim() >= 2]
    plain = [p for p in masters.values() if p.dim() < 2]
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )


def _total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Norm of all gradients together, float32, on their device."""
    if all(gradient.dtype == torch.float32 for gradient in gradients):
        return torch.nn.utils.get_total_norm(gradients)
    norms = torch._foreach_norm(list(gradients), 2.0, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(list(norms)))
