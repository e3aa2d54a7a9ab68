"""How fast a device copies memory, and the least time a rollout's memory traffic can take at that speed."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.rollout.native.cache import KVLayout
from paceline.telemetry.flops import ModelShape

_COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read plus written per second of a large copy: the median of 5 rounds of 10 copies."""
    source = torch.rand(_COPY_BYTES[device.type] // 4, device=device)
    target = torch.empty_like(source)
    rounds = []
    for _ in range(6):
        wait(device)
        started = time.perf_counter()
        for _ in range(10):
            target.copy_(source)
        wait(device)
        rounds.append((time.perf_counter() - started) / 10)
    return 2 * source.numel() * 4 / sorted(rounds[1:])[2]


def wait(device: torch.device) -> None:
    """Until the device has done everything it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that decoding must read: the weights once per step, and every sample's keys and values once per token."""

    weight_bytes: float
    kv_bytes: float
    kv_bytes_prompts_once: float
    """With the keys of a prompt read once per step for all samples of its group."""


def decode_traffic(
    shape: ModelShape, layout: KVLayout, samples: Sequence[tuple[int, int, int]], num_steps: int
) -> Traffic:
    """`samples`: (group, prompt tokens, generated tokens). The first token comes from the prompt, so n tokens take
    n - 1 decoding steps, of which step t reads prompt + t tokens. `num_steps` steps were run in all."""
    size = layout.dtype.itemsize
    weights = (shape.body_parameters + shape.head_parameters) * size
    own = sum((new - 1) * new // 2 for _, _, new in samples)
    prompts = sum((new - 1) * prompt for _, prompt, new in samples)
    longest: dict[int, tuple[int, int]] = {}
    for group, prompt, new in samples:
        longest[group] = max(longest.get(group, (0, prompt)), (new - 1, prompt))
    once = sum(steps * prompt for steps, prompt in longest.values())
    token = layout.bytes_per_token
    return Traffic(weights * num_steps, (own + prompts) * token, (own + once) * token)
