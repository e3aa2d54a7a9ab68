"""What is done to rewards, or decided from them, before they become advantages. Free of torch."""

from collections.abc import Sequence


def overlong_penalty(num_tokens: int, max_new_tokens: int, cache: int) -> float:
    """Soft over-long punishment, to be added to the reward (DAPO, Yu et al. 2025, eq. 13); between -1 and 0.

    0 up to `max_new_tokens - cache` response tokens, falling linearly to -1 at `max_new_tokens`, -1 beyond; `cache` 0
    switches it off. Raises `ValueError` when the cache does not fit in `max_new_tokens`.
    """
    if not 0 <= cache <= max_new_tokens:
        raise ValueError(f"cache must be between 0 and max_new_tokens = {max_new_tokens}, and {cache} is not")
    if cache == 0:
        return 0.0
    excess = num_tokens - (max_new_tokens - cache)
    return -min(1.0, excess / cache) if excess > 0 else 0.0


def has_signal(scores: Sequence[float | None]) -> bool:
    """Whether a group's scores tell its members apart: at least two verdicts (None is none) that differ."""
    verdicts = [score for score in scores if score is not None]
    return any(score != verdicts[0] for score in verdicts[1:])
