"""What follows from the settings for rewards: the sources of a run by name, their models, their addresses."""

from collections.abc import Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from paceline.config.reward_schema import (
    AnySource,
    JudgeSource,
    LoadedSource,
    ModelSource,
    RemoteSource,
    RuleSource,
)
from paceline.config.schema import AUTO_TOKEN_BUDGET, Config, ModelSection


def reward_sources(config: Config) -> Mapping[str, AnySource]:
    """Sources of the reward by name; empty when a rule (`task.reward`) is all there is."""
    if config.reward.sources:
        return config.reward.sources
    if is_address(config.task.reward):
        return {"remote": RemoteSource(kind="remote", url=config.task.reward)}
    return {}


def is_address(reward: str) -> bool:
    """Whether `task.reward` names a service and not a function."""
    return reward.startswith(("http://", "https://"))


def source_key(config: Config, name: str, setting: str) -> str:
    """The dotted name of a source's setting, as a refusal shows it."""
    return f"reward.sources.{name}.{setting}" if config.reward.sources else "task.reward"


def rule_names(config: Config, task_rule: str) -> Mapping[str, str]:
    """Function by source name of every rule; `task_rule` is the one that `task.reward` comes to. Without sources the
    name of the only one is "task"."""
    sources = reward_sources(config)
    if not sources:
        return {"task": task_rule}
    return {name: s.name or task_rule for name, s in sources.items() if isinstance(s, RuleSource)}


def scored_by_rules(config: Config) -> bool:
    """Whether functions are all that scores."""
    return all(isinstance(source, RuleSource) for source in reward_sources(config).values())


def source_model(config: Config, source: LoadedSource) -> ModelSection:
    """The model section that a source's model is loaded by."""
    return ModelSection(
        path=source.path,
        revision=source.revision,
        tokenizer_path=source.tokenizer_path,
        chat_template=source.chat_template,
        dtype=source.dtype or config.model.dtype,
        trust_remote_code=source.trust_remote_code,
    )


def source_model_paths(config: Config) -> dict[str, str]:
    """Paths of the models among the reward's sources, by the source's name."""
    return {
        name: source.path
        for name, source in reward_sources(config).items()
        if isinstance(source, ModelSource | JudgeSource)
    }


def model_source_budget(config: Config, source: ModelSource) -> int:
    """Most tokens of one micro-batch of a reward model, per device; 0 until an automatic budget is settled."""
    return source.token_budget or config.batch.forward_token_budget or 2 * config.batch.token_budget


def is_loopback(url: str) -> bool:
    """Whether an address is on this machine."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def describe_source(config: Config, source: AnySource) -> str:
    """One line for `--dry-run`: what the source is and what it counts for."""
    match source:
        case RuleSource():
            text = f"rule {source.name or config.task.reward}, {config.task.reward_workers} workers"
        case ModelSource():
            budget = model_source_budget(config, source)
            tokens = "auto" if budget == AUTO_TOKEN_BUDGET else f"{budget:,} tokens a pass"
            text = f"reward model {source.path}{_form(source)}, {tokens}"
        case JudgeSource():
            how = "greedy" if source.temperature == 0 else f"temperature {source.temperature:g}"
            text = f"judge {source.path}{_form(source)}, {how}, at most {source.max_new_tokens:,} tokens"
        case RemoteSource():
            text = (
                f"remote {source.url}, {source.batch_size} samples a request, {source.concurrency} at a time, "
                f"{source.timeout_s:g} s each, {source.retries} retries"
            )
    return f"{source.weight:g} x {text}{', optional' if source.optional else ''}"


def _form(source: LoadedSource) -> str:
    quantized = "" if source.quantization == "none" else f" in {source.quantization}"
    return f"{quantized}{', on the host between uses' if source.host_between_uses else ''}"
