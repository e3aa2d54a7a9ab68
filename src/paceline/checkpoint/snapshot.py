"""A copy of the training state that later steps cannot touch, checked to be finite."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.errors import CheckpointError, NonFiniteStateError
from paceline.checkpoint.pieces import Held, Layout, Region, local_of, region_of, written_by
from paceline.checkpoint.ranks import Ranks, raise_together

TensorGroups = Mapping[str, Mapping[str, Held]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Host copies of the tensors this rank writes, with where each lies in its tensor, the names that share one, and
    the scalars as JSON text."""

    tensors: dict[str, dict[str, Tensor]]
    regions: dict[str, dict[str, Region]]
    aliases: dict[str, dict[str, str]]
    state_text: str


def take_snapshot(tensors: TensorGroups, state: Mapping[str, Any], ranks: Ranks) -> Snapshot:
    """Copies what this rank writes to host memory; tensors of one group that share their memory are copied once.

    Every rank must call it; what one of them finds wrong is raised on all.

    Raises:
        NonFiniteStateError: a tensor or a number in `state` is NaN or infinite.
        CheckpointError: `state` holds what JSON cannot, a key that is not text, or a group cannot name a file; or a
            tensor that is held whole differs between ranks.
    """
    error: Exception | None = None
    snapshot: Snapshot | None = None
    own, aliases = own_layout(tensors, with_check=ranks.world_size > 1)
    layouts: list[Layout] = ranks.gather_objects(own)
    try:
        _check_json(state, "state")
        snapshot = _copy(tensors, state, own, aliases, written_by(layouts, ranks.rank))
    except Exception as raised:  # whatever it is, the other ranks must not write either; raised on below
        error = raised
    raise_together(ranks, error)
    assert snapshot is not None
    return snapshot


def own_layout(
    tensors: TensorGroups, with_check: bool
) -> tuple[dict[tuple[str, str], Region], dict[str, dict[str, str]]]:
    """What this rank holds, names that share another's memory left out, and those names."""
    layout: dict[tuple[str, str], Region] = {}
    aliases: dict[str, dict[str, str]] = {}
    for group, named in tensors.items():
        aliases[group] = {}
        first_name: dict[tuple[Any, ...], str] = {}
        for name, tensor in named.items():
            local = local_of(tensor)
            identity = (local.device, local.data_ptr(), local.dtype, tuple(local.shape), local.stride())
            if local.numel() and identity in first_name:
                aliases[group][name] = first_name[identity]
                continue
            first_name[identity] = name
            layout[group, name] = region_of(tensor, with_check)
    return layout, aliases


def _copy(
    tensors: TensorGroups,
    state: Mapping[str, Any],
    layout: Layout,
    aliases: dict[str, dict[str, str]],
    mine: set[tuple[str, str]],
) -> Snapshot:
    copies: dict[str, dict[str, Tensor]] = {}
    regions: dict[str, dict[str, Region]] = {}
    for group, named in tensors.items():
        if not group.isidentifier():
            raise CheckpointError(f"group {group!r} names a file, so it must be a plain word")
        copies[group], regions[group] = {}, {}
        for name, tensor in named.items():
            if (group, name) in mine:
                local = local_of(tensor)
                check_finite(local, f"{group}/{name}")
                copies[group][name] = local.detach().to("cpu", copy=True).contiguous()
                regions[group][name] = layout[group, name]
    return Snapshot(copies, regions, aliases, json.dumps(state, allow_nan=False))


def check_finite(tensor: Tensor, name: str) -> None:
    """Raises `NonFiniteStateError` when a floating-point tensor holds NaN or infinity."""
    if not tensor.numel() or not (tensor.is_floating_point() or tensor.is_complex()):
        return
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    # one pass without a mask as large as the tensor: both ends are finite exactly when all values are
    low, high = torch.aminmax(values)
    if not (math.isfinite(low.item()) and math.isfinite(high.item())):
        raise NonFiniteStateError(f"{name} holds NaN or infinity; nothing was saved")


def _check_json(value: Any, where: str) -> None:
    if value is None or isinstance(value, bool | int | str):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise NonFiniteStateError(f"{where} is {value}; nothing was saved")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}; JSON would turn it into text")
            _check_json(inner, f"{where}.{key}")
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        for index, inner in enumerate(value):
            _check_json(inner, f"{where}[{index}]")
    else:
        raise CheckpointError(f"{where} is a {type(value).__name__}, which JSON does not hold")
