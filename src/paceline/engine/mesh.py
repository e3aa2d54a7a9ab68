"""Where this process stands among the ranks of a role: which samples, tokens and heads are its own.

Mesh axes, outermost first: replicate (HSDP) x shard (FSDP) x sp (Ulysses) x tp. Samples are divided over
replicate x shard; the sp ranks of one such data rank share its tokens, the tp ranks its matrix products.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from paceline.config.parallelism import MeshSizes

Axis = Literal["world", "data", "sp", "tp"]


@dataclass(frozen=True, slots=True, eq=False)
class RankMesh:
    """This rank's place. `RankMesh.single()` is one process without a process group, where nothing communicates."""

    rank: int = 0
    sizes: MeshSizes = field(default_factory=MeshSizes)
    parameter_mesh: DeviceMesh | None = None
    """Axes replicate, fsdp (shard x sp) and tp: how parameters are divided."""
    object_group: dist.ProcessGroup | None = None
    groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)
    """Along the axes data, sp and tp, where an axis has several ranks."""

    @classmethod
    def single(cls) -> "RankMesh":
        """One process."""
        return cls()

    @classmethod
    def from_process_group(
        cls, sizes: MeshSizes, device_type: str, timeout_s: float | None = None
    ) -> "RankMesh":
        """The mesh over the initialised default process group; every rank must call it, in the same order.

        `timeout_s` bounds waits over the CPU (`gather_objects`); None is PyTorch's limit.

        Raises:
            ValueError: the process group has another number of ranks.
        """
        world_size = dist.get_world_size()
        if world_size != sizes.num_ranks:
            raise ValueError(f"the process group has {world_size} ranks, and the mesh {sizes} is over others")
        sp, tp = sizes.sequence_parallel, sizes.tensor_parallel
        return cls(
            rank=dist.get_rank(),
            sizes=sizes,
            parameter_mesh=init_device_mesh(
                device_type,
                (sizes.replicate, sizes.shard * sp, tp),
                mesh_dim_names=("replicate", "fsdp", "tp"),
            ),
            object_group=dist.new_group(
                backend="gloo", timeout=None if timeout_s is None else timedelta(seconds=timeout_s)
            ),
            groups=_token_groups(sizes, device_type),
        )

    @property
    def world_size(self) -> int:
        """All ranks of the role."""
        return self.sizes.num_ranks

    @property
    def num_data(self) -> int:
        """Ways in which samples are divided."""
        return self.sizes.num_data

    @property
    def data_index(self) -> int:
        """Which share of the samples is this rank's."""
        return self.rank // (self.sp_size * self.tp_size)

    @property
    def sp_size(self) -> int:
        """Ranks that share every sequence."""
        return self.sizes.sequence_parallel

    @property
    def sp_index(self) -> int:
        """This rank's part of every sequence."""
        return self.rank // self.tp_size % self.sp_size

    @property
    def sp_group(self) -> dist.ProcessGroup | None:
        """The ranks that share this rank's sequences; None when it is alone."""
        return self.groups["sp"] if self.sp_size > 1 else None

    @property
    def tp_size(self) -> int:
        """Ranks that share every matrix product."""
        return self.sizes.tensor_parallel

    @property
    def tp_index(self) -> int:
        """This rank's part of every matrix product."""
        return self.rank % self.tp_size

    @property
    def tp_group(self) -> dist.ProcessGroup | None:
        """The ranks that share this rank's matrix products; None when it is alone."""
        return self.groups["tp"] if self.tp_size > 1 else None

    @property
    def is_first(self) -> bool:
        """Whether this rank reports what all ranks know alike."""
        return self.rank == 0

    @property
    def reports_share(self) -> bool:
        """Whether this rank reports for its data rank: its sp and tp peers hold the same results."""
        return self.sp_index == 0 and self.tp_index == 0

    def gather_objects(self, value: Any) -> list[Any]:
        """Everybody's `value` in order of world ranks, over the CPU; every rank must call it."""
        if self.object_group is None:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self.object_group)
        return found

    def sum(self, tensor: Tensor, axis: Axis = "world") -> Tensor:
        """Sum of `tensor` over the ranks of an axis, as a new tensor that is bit-equal on all of them."""
        return self._reduce(tensor, axis, dist.ReduceOp.SUM)

    def max(self, tensor: Tensor, axis: Axis = "world") -> Tensor:
        """Maximum of `tensor` over the ranks of an axis, element by element, as a new tensor."""
        return self._reduce(tensor, axis, dist.ReduceOp.MAX)

    def max_count(self, count: int) -> int:
        """The largest of everybody's counts, over the CPU."""
        if self.object_group is None:
            return count
        found = torch.tensor([count])
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.object_group)
        return int(found)

    def _reduce(self, tensor: Tensor, axis: Axis, operation: dist.ReduceOp.RedOpType) -> Tensor:
        found = tensor.detach().clone()
        if axis == "world" and self.parameter_mesh is not None:
            dist.all_reduce(found, operation)
        elif axis in self.groups:
            dist.all_reduce(found, operation, group=self.groups[axis])
        return found


def _token_groups(sizes: MeshSizes, device_type: str) -> dict[str, dist.ProcessGroup]:
    """This rank's peers along the axes that have any: a group costs threads or device memory even when alone in it."""
    axes = {"data": sizes.num_data, "sp": sizes.sequence_parallel, "tp": sizes.tensor_parallel}
    names = [name for name, size in axes.items() if size > 1]
    if not names:
        return {}
    mesh = init_device_mesh(device_type, tuple(axes[name] for name in names), mesh_dim_names=tuple(names))
    return {name: mesh.get_group(name) for name in names}
