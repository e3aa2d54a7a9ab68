"""A reward that is slow on purpose. No heavy imports: every reward worker loads this."""

import time
from typing import Any

from tiny_rewards import even_share

SLEEP_S = 0.006


def slow_even_share(completion: str, *, answer: str | None, metadata: Any, prompt: str) -> float:
    """The share of even words, after a nap."""
    time.sleep(SLEEP_S)  # the planted slow-down
    return even_share(completion, answer=answer, metadata=metadata, prompt=prompt)
