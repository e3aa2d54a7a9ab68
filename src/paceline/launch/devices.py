"""Device kinds: how many there are, which collectives they speak, and how a rank takes its own.

Ascend NPUs come through torch-npu (`torch.npu`, HCCL). That path is unverified: it was written from torch-npu's
documented interface and has never run on such a device.
"""

import importlib
import importlib.util

import torch

from paceline.config.errors import ConfigError

_COLLECTIVES = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


def resolve_kind(device: str) -> str:
    """`auto` is CUDA where present, else an NPU where torch-npu shows one, else the CPU.

    Raises:
        ConfigError: the kind asked for is not there.
    """
    if device == "auto":
        return next(kind for kind in ("cuda", "npu", "cpu") if num_devices(kind))
    if not num_devices(device):
        raise ConfigError("cluster.device", device, f"this machine shows no {device} device to torch", "cpu")
    return device


def num_devices(kind: str) -> int:
    """Devices of a kind that torch sees; a CPU counts as one however many ranks share it."""
    if kind == "cuda":
        return torch.cuda.device_count()
    if kind == "npu":
        return int(torch.get_device_module("npu").device_count()) if _load_npu() else 0
    return 1


def check_device_count(kind: str, wanted: int) -> None:
    """Refuses more ranks on a node than it has devices, before anything waits for the missing ones.

    CPU ranks are processes that share the cores, so any number of them is possible.

    Raises:
        ConfigError: there are fewer devices.
    """
    if kind != "cpu" and wanted > (found := num_devices(kind)):
        rule = f"this machine shows {found} {kind} device{'s' * (found != 1)} to torch"
        raise ConfigError("cluster.num_devices", wanted, rule, str(found))


def take_device(kind: str, local_rank: int) -> torch.device:
    """The device of a node's `local_rank`-th process, made the process's current one."""
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device(kind, local_rank)
    torch.get_device_module(kind).set_device(device)
    return device


def backends(kind: str) -> str:
    """Process-group backends: the device's own, and gloo for Python objects and everything else on the host."""
    own = _COLLECTIVES[kind]
    return own if kind == "cpu" else f"cpu:gloo,{kind}:{own}"


def device_name(device: torch.device) -> str | None:
    """What the driver calls a device; None for a CPU."""
    if device.type == "cpu":
        return None
    return str(torch.get_device_module(device).get_device_name(device))


def _load_npu() -> bool:
    """Imports torch-npu, which registers `torch.npu` and HCCL, where it is installed."""
    if importlib.util.find_spec("torch_npu") is None:
        return False
    importlib.import_module("torch_npu")
    return True
