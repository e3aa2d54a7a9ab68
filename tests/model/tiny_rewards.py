"""Rewards that misbehave on purpose."""

from typing import Any


def always_right(completion: str, *, answer: str | None, metadata: Any, prompt: str) -> float:
    """A group of these has nothing to learn from."""
    return 1.0


def sometimes_raises(completion: str, *, answer: str | None, metadata: Any, prompt: str) -> float:
    """Raises for completions that begin with an odd word."""
    words = completion.split()
    if words and words[0][1:].isdigit() and int(words[0][1:]) % 2:
        raise RuntimeError("odd")
    return float(len(words) % 3)
