"""The reward of a run: one pool of a rule's workers, or several sources. What is cheap to refuse is refused first."""

from pathlib import Path

from paceline.config import Config
from paceline.config.reward_schema import RemoteSource
from paceline.config.rewards import reward_sources, rule_names, source_key
from paceline.rewards.combination import RewardSource, SourcedRewards, Weighting
from paceline.rewards.functions import resolve
from paceline.rewards.pool import RewardPool
from paceline.rewards.remote import RemoteScorer
from paceline.types import RewardSpec


def check_rewards(config: Config, task_reward: RewardSpec) -> None:
    """Imports every rule once, in this process.

    Raises:
        ConfigError: one of them cannot be used.
    """
    for spec in _rules(config, task_reward).values():
        resolve(spec)


def start_rewards(
    config: Config, task_reward: RewardSpec, num_workers: int, log_path: Path
) -> RewardPool | SourcedRewards:
    """`num_workers` of every rule start, and services are ready to be asked.

    Raises:
        ConfigError: a source lacks what it needs from the environment.
    """
    sources = reward_sources(config)
    if not sources:
        return RewardPool(task_reward, num_workers, config.task.reward_timeout_s, log_path)
    weightings = {name: Weighting(source.weight, source.optional) for name, source in sources.items()}
    opened: dict[str, RewardSource] = {}
    for name, source in sources.items():
        if isinstance(source, RemoteSource):
            opened[name] = RemoteScorer(source, source_key(config, name, "auth_env"))
    for name, spec in _rules(config, task_reward).items():
        opened[name] = RewardPool(spec, num_workers, config.task.reward_timeout_s, log_path)
    return SourcedRewards(weightings, opened)


def _rules(config: Config, task_reward: RewardSpec) -> dict[str, RewardSpec]:
    return {
        source: task_reward if function == task_reward.name else RewardSpec(function)
        for source, function in rule_names(config, task_reward.name).items()
    }
