"""Learning rate of an optimiser update."""

import math

from paceline.config.schema import TrainSection


def learning_rate(settings: TrainSection, update_index: int, num_updates: int) -> float:
    """Rate of update `update_index` (from 0) of `num_updates` in all.

    Linear warm-up to `lr` over `warmup_steps` updates (the first already has lr / warmup_steps); then constant, or
    linear or cosine decay that would reach 0 at update `num_updates`.
    """
    if update_index < settings.warmup_steps:
        return settings.lr * (update_index + 1) / settings.warmup_steps
    if settings.lr_schedule == "constant":
        return settings.lr
    num_decaying = max(1, num_updates - settings.warmup_steps)
    done = min(1.0, (update_index - settings.warmup_steps) / num_decaying)
    if settings.lr_schedule == "linear":
        return settings.lr * (1.0 - done)
    return settings.lr * 0.5 * (1.0 + math.cos(math.pi * done))
