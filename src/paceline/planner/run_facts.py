"""What an estimate needs beside the config."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from paceline.planner.model_shape import MemoryShape


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the config alone does not say. `element_bytes` of the working dtype; `longest_prompt` in tokens, None
    before the task is read; `on_cpu`: attention goes by pieces and layers are never fused; `device_bytes`: memory of
    the whole device, of which some engines take a share; None where no device is known."""

    shape: MemoryShape
    element_bytes: int
    longest_prompt: int | None = None
    on_cpu: bool = False
    critic_shape: MemoryShape | None = None
    source_shapes: Mapping[str, MemoryShape] = field(default_factory=dict)
    """Of the models among the reward's sources, by the source's name."""
    device_bytes: float | None = None
