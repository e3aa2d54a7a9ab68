"""The benchmarks' reward, in a module of its own: reward workers import nothing else. Torch-free."""

from typing import Any


def length_reward(completion: str, *, answer: str | None, metadata: Any, prompt: str) -> float:
    """Cheap and varied, so that every group has a signal: the completion's length modulo 7."""
    return float(len(completion) % 7)
