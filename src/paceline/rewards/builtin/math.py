"""Reward 1 when the completion's final expression equals the reference answer, judged by math-verify."""

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from paceline.config.errors import ConfigError
from paceline.rewards.functions import KEY, RewardFunction


def math() -> RewardFunction:
    """1.0 if math-verify holds the completion equal to the answer, else 0.0.

    math-verify limits its own time by a signal, which works in a process's main thread only: workers call rewards
    from there. Raises `ConfigError` when math-verify is not installed, `ValueError` (an error verdict) for an answer
    that is missing or in which math-verify finds no expression.
    """
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError(KEY, "math", "needs math-verify: pip install 'paceline[math]'", "exact_match")
    math_verify = importlib.import_module("math_verify")

    def score(completion: str, *, answer: str | None, metadata: Mapping[str, Any], prompt: str) -> float:
        if answer is None:
            raise ValueError("math needs a reference answer and the prompt has none")
        # Only inside a math environment is a bare answer read whole: as running text, "1+x^2" would be read as 1.
        is_bare = "$" not in answer and "\\boxed" not in answer
        expected = math_verify.parse(f"${answer}$" if is_bare else answer) or math_verify.parse(answer)
        if not expected:
            raise ValueError(f"no expression found in the reference answer {answer!r}")
        return float(math_verify.verify(expected, math_verify.parse(completion)))

    return score
