"""Rewards for tiny runs, some of which misbehave on purpose. No heavy imports: every reward worker loads this."""

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


def even_share(completion: str, *, answer: str | None, metadata: Any, prompt: str) -> float:
    """Share of words with an even number; 0 for an empty completion."""
    words = completion.split()
    return sum(word[1:].isdigit() and int(word[1:]) % 2 == 0 for word in words) / len(words) if words else 0.0


def easy_and_hard_prompts(completion: str, *, answer: str | None, metadata: Any, prompt: str) -> float:
    """Share of even words, and 1 more where the prompt's answer is even: most of a return is known from the prompt."""
    words = completion.split()
    share = sum(word[1:].isdigit() and int(word[1:]) % 2 == 0 for word in words) / max(1, len(words))
    return share + float(answer is not None and int(answer[1:]) % 2 == 0)


def one_prompt_alone(completion: str, *, answer: str | None, metadata: Any, prompt: str) -> float:
    """Only samples of the prompt that begins with w1 differ in their reward."""
    return float(len(set(completion.split()))) if prompt.startswith("w1 ") else 0.0
