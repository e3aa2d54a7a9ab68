"""Rules of the critic's settings. Each is one function: a config in, the problem (or None) out."""

import json

from paceline.config.critic import has_critic, num_critic_updates
from paceline.config.errors import ConfigError
from paceline.config.schema import AlgorithmSection, Config

GAE_FIELDS = {"gamma", "gae_lambda", "whiten_advantages", "value_clip"}
"""Settings of `algorithm` that act with advantage gae only."""


def critic_warm_up_ends(config: Config) -> ConfigError | None:
    if not has_critic(config):
        return None
    updates, wanted = num_critic_updates(config), config.critic.warmup_steps
    if wanted <= updates or updates < 1:
        return None
    rule = f"must be at most the critic's {updates} updates, or its learning rate never reaches critic.lr"
    return ConfigError("critic.warmup_steps", wanted, rule, str(updates))


def critic_settings_have_a_critic(config: Config) -> ConfigError | None:
    if has_critic(config):
        return None
    without = f"has no effect: algorithm.advantage is {config.algorithm.advantage}, which has no critic"
    problems = [
        ConfigError(f"critic.{key}", value, without, "algorithm.name: ppo, or leave it out")
        for key, value in config.critic.model_dump(mode="json", exclude_defaults=True).items()
    ]
    problems += [
        ConfigError(
            f"algorithm.{key}", value, without, json.dumps(AlgorithmSection.model_fields[key].default)
        )
        for key, value in config.algorithm.model_dump(include=GAE_FIELDS, exclude_defaults=True).items()
    ]
    return ConfigError.join(problems) if problems else None


def the_actor_trains_after_the_critic(config: Config) -> ConfigError | None:
    steps, own = config.run.num_steps, config.critic.pretrain_steps
    if not has_critic(config) or own < steps:
        return None
    rule = f"must be below run.num_steps = {steps}, or the actor is never updated"
    return ConfigError("critic.pretrain_steps", own, rule, str(steps - 1))


def critic_revision_has_a_path(config: Config) -> ConfigError | None:
    critic = config.critic
    if not has_critic(config) or critic.revision is None or critic.path is not None:
        return None
    rule = "names a revision of critic.path, which is not set; model.path has model.revision"
    return ConfigError("critic.revision", critic.revision, rule, "null")


CRITIC_RULES = (
    critic_settings_have_a_critic,
    critic_warm_up_ends,
    the_actor_trains_after_the_critic,
    critic_revision_has_a_path,
)
