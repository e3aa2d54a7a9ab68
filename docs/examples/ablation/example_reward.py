"""The reward of the example: the share of short words. Dense, so that every group of samples has a signal."""

from typing import Any


def short_words(completion: str, *, answer: str | None, metadata: Any, prompt: str) -> float:
    """Words of at most four letters among all words; 0 for an empty completion."""
    words = completion.split()
    return sum(len(word.strip(".,:;!?")) <= 4 for word in words) / max(1, len(words))
