"""Rules of how replicas agree. Each is one function: a config in, the problem (or None) out."""

from paceline.config.critic import critic_epochs, has_critic, mini_batches_per_rollout
from paceline.config.errors import ConfigError
from paceline.config.schema import Config
from paceline.config.sft import is_sft

LEAST_LOCAL_STEPS = 4
"""Replicas that update by themselves exchange masters and two moments, three times the bytes of a gradient: fewer
updates between two exchanges save nothing."""


def gradient_sync_has_replicas(config: Config) -> ConfigError | None:
    if config.cluster.replicate_size > 1:
        return None
    changed = config.train.model_dump(
        include={"gradient_sync", "gradient_sync_fraction", "gradient_sync_every"}, exclude_defaults=True
    )
    rule = "has no effect: cluster.replicate_size is 1, so no two ranks hold the same weights"
    problems = [
        ConfigError(f"train.{key}", value, rule, "leave it out, or cluster.replicate_size: 2")
        for key, value in changed.items()
    ]
    return ConfigError.join(problems) if problems else None


def gradient_sync_fraction_is_of_top_k(config: Config) -> ConfigError | None:
    train = config.train
    if train.gradient_sync_fraction is None or train.gradient_sync.startswith("topk"):
        return None
    rule = f"is how much top-k sends, and train.gradient_sync is {train.gradient_sync}"
    return ConfigError("train.gradient_sync_fraction", train.gradient_sync_fraction, rule, "leave it out")


def local_steps_save_something(config: Config) -> ConfigError | None:
    """Replicas also meet after every rollout's last update, so that samples come from one set of weights."""
    train, key = config.train, "train.gradient_sync_every"
    every = train.gradient_sync_every
    if every == 1:
        return None
    if train.gradient_sync != "exact":
        rule = "averages weights as they are, so gradients between replicas are not compressed as well"
        return ConfigError("train.gradient_sync", train.gradient_sync, rule, f"exact, or {key}: 1")
    if is_sft(config):
        return ConfigError(key, every, "is for runs that sample; supervised runs sum every gradient", "1")
    if every < LEAST_LOCAL_STEPS:
        rule = (
            f"must be 1 or at least {LEAST_LOCAL_STEPS}: replicas then exchange masters and two moments, "
            "three times the bytes of a gradient"
        )
        return ConfigError(key, every, rule, str(LEAST_LOCAL_STEPS))
    epochs = [config.batch.num_epochs, *([critic_epochs(config)] if has_critic(config) else [])]
    updates = mini_batches_per_rollout(config) * min(epochs)
    if every > updates:
        rule = f"must be at most the {updates} updates of a rollout, after the last of which replicas meet anyway"
        return ConfigError(key, every, rule, str(updates) if updates >= LEAST_LOCAL_STEPS else "1")
    return None


GRADIENT_SYNC_RULES = (
    gradient_sync_has_replicas,
    gradient_sync_fraction_is_of_top_k,
    local_steps_save_something,
)
