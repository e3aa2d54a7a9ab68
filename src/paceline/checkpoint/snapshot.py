"""A copy of the training state that later steps cannot touch, checked to be finite."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.errors import CheckpointError, NonFiniteStateError

TensorGroups = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Host copies of all tensors, the names that share one, and the scalars as JSON text."""

    tensors: dict[str, dict[str, Tensor]]
    aliases: dict[str, dict[str, str]]
    state_text: str


def take_snapshot(tensors: TensorGroups, state: Mapping[str, Any]) -> Snapshot:
    """Copies everything to host memory; tensors of one group that share their memory are copied once.

    Raises:
        NonFiniteStateError: a tensor or a number in `state` is NaN or infinite.
        CheckpointError: `state` holds what JSON cannot, a key that is not text, or a group cannot name a file.
    """
    _check_json(state, "state")
    copies: dict[str, dict[str, Tensor]] = {}
    aliases: dict[str, dict[str, str]] = {}
    for group, named in tensors.items():
        if not group.isidentifier():
            raise CheckpointError(f"group {group!r} names a file, so it must be a plain word")
        copies[group], aliases[group] = {}, {}
        first_name: dict[tuple[Any, ...], str] = {}
        for name, tensor in named.items():
            identity = (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
            if tensor.numel() and identity in first_name:
                aliases[group][name] = first_name[identity]
                continue
            first_name[identity] = name
            check_finite(tensor, f"{group}/{name}")
            copies[group][name] = tensor.detach().to("cpu", copy=True).contiguous()
    return Snapshot(copies, aliases, json.dumps(state, allow_nan=False))


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
