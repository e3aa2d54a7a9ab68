"""A loaded model divided over the ranks of a mesh, and gathered again for generation.

FSDP2 shards every layer, and what stands outside layers (embeddings, final norm, heads) together as the root. The
shards of trained parameters are float32: they are the optimiser's masters, and gathering casts them to the working
dtype. Gradients are reduced in float32 and *summed* over ranks, because losses are partial sums over one denominator.

Anything a role reads with (a value head, adapters) must be registered under `CausalModel.module` before this.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from paceline.config.schema import TrainSection
from paceline.engine.mesh import RankMesh
from paceline.engine.recompute import decoder_layers
from paceline.engine.shards import full_tensor
from paceline.model.loading import CausalModel
from paceline.model.parallel.groups import ModelPeers, Peers
from paceline.model.parallel.tensor_parallel import apply_tensor_parallel


class ForwardRoot(nn.Module):
    """FSDP's root: its call gathers what stands outside layers around whatever `body` does with the model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, body: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return body()


class ReplicaSync(Protocol):
    """How the copies of a model agree in place of HSDP's exact all-reduce (`gradient_sync/replicas.py`)."""

    def hook(self) -> Callable[[Tensor], None]:
        """Called once per FSDP part, in the same order on every rank: what its backward pass hands the part's flat
        gradient to, float32, summed over the ranks of one copy; it changes the gradient in place."""
        ...

    def expect(self, is_last: bool) -> None:
        """Says before each micro-batch whether it is the update's last."""
        ...


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """`model` computes on shards. `parameters` are the sharded ones by the unsharded model's names.

    `partly_seen` names parameters whose gradient must be summed over tensor-parallel ranks. `view` is the same
    architecture without weights of its own, for `unsharded`.
    """

    model: CausalModel
    parameters: Mapping[str, nn.Parameter]
    partly_seen: frozenset[str]
    view: CausalModel | None
    replica_sync: ReplicaSync | None = None

    def before_micro_batch(self, is_last: bool) -> None:
        """Gradients stay sums over the ranks of one copy until the last micro-batch of an update."""
        if self.replica_sync is not None:
            self.replica_sync.expect(is_last)
        elif isinstance(self.model.root, FSDPModule):
            self.model.root.set_requires_all_reduce(is_last)


def shard_model(
    model: CausalModel,
    mesh: RankMesh,
    settings: TrainSection,
    replica_sync: ReplicaSync | None = None,
) -> ShardedModel:
    """Divides `model` over the mesh, in place; every rank must hold the same weights. One rank: nothing changes.

    Parameters that require no gradient keep the working dtype in their shards. With `replica_sync` each copy is
    sharded by itself, and copies meet in its hooks alone.

    Raises:
        ConfigError: the model cannot be divided over the tensor-parallel ranks.
    """
    module = model.module
    if mesh.parameter_mesh is None:
        return ShardedModel(model, dict(module.named_parameters()), frozenset(), None)
    view = _without_weights(model)
    partly_seen: frozenset[str] = frozenset()
    if mesh.tp_size > 1:
        seen = apply_tensor_parallel(module, mesh.parameter_mesh["tp"])
        partly_seen = frozenset(name for name, p in module.named_parameters() if id(p) in seen)
    root = ForwardRoot(module)
    layers = decoder_layers(module, model.shape.num_layers)
    _apply_fsdp(root, layers, mesh, settings, model.dtype, replica_sync)
    peers = ModelPeers(
        sequence=Peers(mesh.sp_size, mesh.sp_index, mesh.sp_group),
        tensor=Peers(mesh.tp_size, mesh.tp_index, mesh.tp_group),
    )
    sharded = replace(model, root=root, peers=peers)
    return ShardedModel(sharded, dict(module.named_parameters()), partly_seen, view, replica_sync)


def reshard(model: CausalModel) -> None:
    """Frees gathered weights. A forward pass without a backward pass leaves the root's gathered, and an optimiser
    step would then not reach them."""
    if model.root is not None:
        for part in model.root.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


@contextmanager
@torch.no_grad()
def unsharded(sharded: ShardedModel) -> Iterator[CausalModel]:
    """The whole model on every rank, in the working dtype, without sharding hooks: what generation runs on.

    Each parameter is gathered over the shard and the tensor-parallel axes, so all ranks generate independently of one
    another, tensor-parallel peers too. The same object every time; its weights are there inside the context only. With
    one rank it is the trained model itself. Every rank must enter.
    """
    if sharded.view is None:
        yield sharded.model
        return
    reshard(sharded.model)
    dtype = sharded.model.dtype
    gathered: dict[int, nn.Parameter] = {}
    for name, parameter in sharded.model.module.named_parameters(remove_duplicate=False):
        if id(parameter) not in gathered:
            whole = full_tensor(parameter.detach().to(dtype))  # cast before gathering: half the bytes
            gathered[id(parameter)] = nn.Parameter(whole, requires_grad=False)
        _fill(sharded.view.module, name, gathered[id(parameter)])
    try:
        yield sharded.view
    finally:
        _empty(sharded.view.module)


def _apply_fsdp(
    root: ForwardRoot,
    layers: list[nn.Module],
    mesh: RankMesh,
    settings: TrainSection,
    dtype: torch.dtype,
    replica_sync: ReplicaSync | None,
) -> None:
    assert mesh.parameter_mesh is not None
    axes = mesh.parameter_mesh
    is_exact_hsdp = mesh.sizes.replicate > 1 and replica_sync is None
    shared = partial(
        fully_shard,
        mesh=axes["replicate", "fsdp"] if is_exact_hsdp else axes["fsdp"],
        mp_policy=MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
    )
    masters: dict[int, nn.Parameter] = {}
    sharded: list[FSDPModule] = []
    for layer in layers:
        _widen(layer, masters)
        sharded.append(shared(layer, reshard_after_forward=settings.reshard_after_forward))
    _widen(root, masters)
    shared(root, reshard_after_forward=False)
    for part in root.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            if replica_sync is not None:
                part.set_all_reduce_hook(replica_sync.hook())
    for index, layer_part in enumerate(sharded):
        ahead = sharded[index + 1 : index + 1 + settings.forward_prefetch]
        if ahead:
            layer_part.set_modules_to_forward_prefetch(ahead)


def _widen(part: nn.Module, masters: dict[int, nn.Parameter]) -> None:
    """Replaces trained parameters by float32 ones; shared ones stay shared."""
    for owner in part.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            is_done = isinstance(parameter, DTensor) and parameter.dtype == torch.float32
            if not parameter.requires_grad or is_done or parameter.dtype == torch.float32:
                continue
            if id(parameter) not in masters:
                masters[id(parameter)] = nn.Parameter(parameter.detach().float())
            owner.register_parameter(name, masters[id(parameter)])


def _without_weights(model: CausalModel) -> CausalModel:
    """A copy of the module with empty parameters; buffers are copied."""
    shared = {id(parameter): parameter for parameter in model.module.parameters()}
    view = copy.deepcopy(model.module, shared)
    view.eval()
    _empty(view)
    return replace(model, module=view)


def _empty(module: nn.Module) -> None:
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            nothing = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            owner.register_parameter(name, nn.Parameter(nothing, requires_grad=False))


def _fill(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, own_name = name.rpartition(".")
    module.get_submodule(owner).register_parameter(own_name, parameter)
