"""Whether a run fits the device it is on, decided before weights are read."""

import psutil
import torch

from paceline.config import Config
from paceline.config.critic import critic_model, has_critic
from paceline.config.schema import ModelSection
from paceline.model.loading import model_settings, resolve_dtype
from paceline.planner.fit import check_fit, stated_device_bytes
from paceline.planner.memory import MemoryEstimate
from paceline.planner.model_shape import MemoryShape
from paceline.planner.run_memory import RunFacts


def check_memory(config: Config, device: torch.device, longest_prompt: int) -> MemoryEstimate | None:
    """The run's estimate; None where the model's layers are not modelled, or nobody says how much memory there is.

    A CPU is checked against `cluster.device_memory_gb` only: what a host can page out nobody knows before.

    Raises:
        ConfigError: the estimate exceeds the device's memory.
    """
    device_bytes = stated_device_bytes(config) if device.type == "cpu" else device_memory(config, device)
    facts = run_facts(config, device, longest_prompt)
    if facts is None or device_bytes is None:
        return None
    return check_fit(config, facts, device_bytes)


def device_memory(config: Config, device: torch.device) -> float:
    """Bytes a run may think of as the device's: stated, or all of an accelerator, or what a host has free now."""
    if config.cluster.device_memory_gb is not None:
        return config.cluster.device_memory_gb * 1e9
    if device.type == "cpu":
        return float(psutil.virtual_memory().available)
    return float(torch.get_device_module(device).mem_get_info(device)[1])


def run_facts(config: Config, device: torch.device, longest_prompt: int) -> RunFacts | None:
    """What the estimate needs beside the config; None where the model's layers are not modelled."""
    try:
        shape = _shape(config.model)
        critic_shape = _shape(critic_model(config)) if has_critic(config) else None
    except ValueError:  # a kind of layer without formulas: a run is not refused for what nobody can say
        return None
    return RunFacts(
        shape,
        element_bytes=resolve_dtype(config.model.dtype, device).itemsize,
        longest_prompt=longest_prompt,
        on_cpu=device.type == "cpu",
        critic_shape=critic_shape,
    )


def _shape(settings: ModelSection) -> MemoryShape:
    return MemoryShape.from_hf_config(model_settings(settings))
