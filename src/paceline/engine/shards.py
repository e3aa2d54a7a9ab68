"""Sharded parameters as plain local tensors: their part of the whole, the whole from the parts, how many hold a copy.

FSDP cuts dimension 0 with `torch.chunk`'s rule (the last ranks may hold less, or nothing). A parameter that tensor
parallelism has cut along dimension 0 already is cut again within its part; this module undoes and redoes both cuts in
that order, for sizes that do not divide too.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard, _StridedShard


def local_part(parameter: Tensor) -> Tensor:
    """This rank's part, sharing the parameter's memory; a plain tensor is its own part."""
    with torch.no_grad():
        return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()


def full_tensor(parameter: Tensor) -> Tensor:
    """The whole tensor on every rank; all ranks of its mesh must call it."""
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    part = local_part(parameter)
    # the last axis was cut first (tensor parallel), so the first axis is put together first
    for axis, placement, shape in _cuts(parameter):
        part = _join(part, placement, shape, parameter.device_mesh.get_group(axis))
    return part


def spread_like(part: Tensor, like: Tensor) -> Tensor:
    """This rank's `part` as a DTensor that is divided as the parameter `like` is; a plain tensor if that is one."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """What this rank holds of `tensor`, which is whole or already divided as the parameter `like` is."""
    if isinstance(tensor, DTensor):
        return local_part(tensor)
    part = tensor
    if isinstance(like, DTensor):
        for axis, placement, _ in reversed(_cuts(like)):
            size, index = like.device_mesh.size(axis), like.device_mesh.get_local_rank(axis)
            part = _chunk(part, _dim(placement), size, index)
    return part


def offsets_of(parameter: Tensor) -> tuple[int, ...]:
    """Where this rank's part begins in the whole, by dim."""
    offsets = [0] * parameter.dim()
    if isinstance(parameter, DTensor):
        for axis, placement, shape in _cuts(parameter):
            dim, mesh = _dim(placement), parameter.device_mesh
            each = -(-shape[dim] // mesh.size(axis))
            offsets[dim] += min(mesh.get_local_rank(axis) * each, shape[dim])
    return tuple(offsets)


def num_copies(parameter: Tensor, world_size: int) -> int:
    """How many of the ranks hold the same part as this one."""
    if not isinstance(parameter, DTensor):
        return world_size
    num_parts = 1
    for axis, placement in enumerate(parameter.placements):
        if not placement.is_replicate():
            num_parts *= parameter.device_mesh.size(axis)
    return world_size // num_parts


def _cuts(parameter: DTensor) -> list[tuple[int, Placement, tuple[int, ...]]]:
    """(mesh axis, placement, shape before this cut) of every cut, outermost axis first."""
    cuts = []
    shape = tuple(parameter.shape)
    mesh = parameter.device_mesh
    for axis in reversed(range(mesh.ndim)):
        placement = parameter.placements[axis]
        if placement.is_replicate():
            continue
        cuts.append((axis, placement, shape))
        dim = _dim(placement)
        length = _chunk_length(shape[dim], mesh.size(axis), mesh.get_local_rank(axis))
        shape = (*shape[:dim], length, *shape[dim + 1 :])
    return cuts[::-1]


def _dim(placement: Placement) -> int:
    assert isinstance(placement, Shard | _StridedShard), f"{placement} is no cut along a dimension"
    return placement.dim


def _chunk_length(total: int, size: int, index: int) -> int:
    each = -(-total // size)
    return max(0, min(each, total - index * each))


def _chunk(tensor: Tensor, dim: int, size: int, index: int) -> Tensor:
    each = -(-tensor.shape[dim] // size)
    length = _chunk_length(tensor.shape[dim], size, index)
    return tensor.narrow(dim, min(index * each, tensor.shape[dim]), length)


def _join(part: Tensor, placement: Placement, shape: tuple[int, ...], group: dist.ProcessGroup) -> Tensor:
    """The parts of all ranks of an axis side by side: all padded to the first's length, gathered, cut to size."""
    dim, size = _dim(placement), group.size()
    each = -(-shape[dim] // size)
    padded = part.new_zeros((*shape[:dim], each, *shape[dim + 1 :]))
    padded.narrow(dim, 0, part.shape[dim]).copy_(part)
    if size == 1:
        return padded.narrow(dim, 0, shape[dim])
    if dim == 0:  # parts lie one behind the other: nothing is copied after the exchange
        joined = padded.new_empty((size * each, *shape[1:]))
        dist.all_gather_into_tensor(joined, padded, group=group)
        return joined.narrow(0, 0, shape[0])
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts, dim=dim).narrow(dim, 0, shape[dim])
