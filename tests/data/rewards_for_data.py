"""Reward functions that the tests of tests/data send to worker processes."""


def accepts_zero(completion: str, answer: str) -> float:
    """A scorer that is too lenient: "0" is right whatever is asked."""
    return float(completion in ("0", answer))
