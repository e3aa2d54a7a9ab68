"""What rollout engines in processes of their own need, looked for before any is started."""

import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import torch

from paceline.config import Config, ConfigError
from paceline.model.loading import CausalModel
from paceline.schedules.engine_weights import published_weights


def check_resources(config: Config, model: CausalModel) -> None:
    """Refuses what this machine cannot give, before any engine is started.

    Raises:
        ConfigError: see the message.
    """
    _check_devices(config, model.device)
    rollout, weights = config.rollout, sum(t.numel() * t.element_size() for _, t in published_weights(model))
    section = rollout.sglang if rollout.engine == "sglang" else rollout.vllm
    _check_space(f"rollout.{rollout.engine}.weight_dir", section.weight_dir, weights)
    if rollout.engine == "vllm" and not rollout.vllm.addresses:
        _check_python(rollout.vllm.python)
    if model.device.type == "cpu":
        cache_gb = rollout.vllm.kv_cache_gb if rollout.engine == "vllm" else rollout.kv_cache_gb or 0.0
        needed = rollout.num_replicas * (weights + cache_gb * 2**30)
        total = psutil.virtual_memory().total
        if needed > total:
            rule = (
                f"replicas of {weights / 2**30:.1f} GiB of weights and {cache_gb:g} GiB of cache need "
                f"{needed / 2**30:.0f} GiB, and this machine has {total / 2**30:.0f}"
            )
            nearest = str(int(total // (needed / rollout.num_replicas)) or "a smaller cache")
            raise ConfigError("rollout.num_replicas", rollout.num_replicas, rule, nearest)


def _check_devices(config: Config, device: torch.device) -> None:
    devices = config.rollout.replicas.devices
    present = torch.cuda.device_count() if device.type == "cuda" else 0
    missing = [number for number in devices if number >= present]
    if missing:
        rule = f"this machine shows {present} devices to torch"
        nearest = str(list(range(present))) if present else "leave it out"
        raise ConfigError("rollout.replicas.devices", list(devices), rule, nearest)


def _check_python(python: str | None) -> None:
    chosen = python or sys.executable
    key = "rollout.vllm.python"
    if shutil.which(chosen) is None:
        raise ConfigError(key, python, "is no program that can be run", "a virtual environment's bin/python")
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    if subprocess.run([chosen, "-c", code], check=False, capture_output=True).returncode:
        rule = "has no vLLM; name a Python that has (docs/rollout-engines.md)"
        raise ConfigError(key, python, rule, "a virtual environment's bin/python")


def _check_space(key: str, folder: str, num_bytes: int) -> None:
    if not Path(folder).is_dir():
        return  # the system's temporary folder is taken (remote/weight_files.py)
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        rule = f"holds {free / 2**30:.1f} GiB, and the weights are {num_bytes / 2**30:.1f} GiB"
        raise ConfigError(key, folder, rule, "a folder with more room")
