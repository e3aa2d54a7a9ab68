"""Rules of the reward's settings. Each is one function: a config in, the problem (or None) out."""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from paceline.config.errors import ConfigError
from paceline.config.reward_schema import (
    AnySource,
    JudgeSource,
    LoadedSource,
    ModelSource,
    RemoteSource,
    RuleSource,
)
from paceline.config.rewards import is_address, is_loopback, reward_sources, source_key
from paceline.config.schema import Config

GROUP_RELATIVE = frozenset({"group_norm", "group_center", "leave_one_out"})
"""Advantages that compare the samples of one prompt only."""

_NAME = re.compile(r"[a-z][a-z0-9_-]*")

Problem = tuple[str, object, str, str | None]
"""Setting within the source, its value, the rule, the nearest valid value."""


def sources_are_well_formed(config: Config) -> ConfigError | None:
    problems = []
    for name, source in reward_sources(config).items():
        if not _NAME.fullmatch(name):
            nearest = re.sub(r"[^a-z0-9_-]+", "_", name.lower()).lstrip("0123456789_-") or "source"
            rule = (
                "a source's name is part of metric names: lower-case letters, digits, - and _, a letter first"
            )
            problems.append(ConfigError("reward.sources", name, rule, nearest))
        problems += [
            ConfigError(source_key(config, name, key), value, rule, nearest)
            for key, value, rule, nearest in _problems(config, source)
        ]
    return ConfigError.join(problems) if problems else None


def the_reward_has_one_home(config: Config) -> ConfigError | None:
    """`task.reward` with sources is the function of a rule source that names none."""
    task_reward, sources = config.task.reward, config.reward.sources
    if not sources or task_reward == "auto":
        return None
    if is_address(task_reward):
        rule = "with reward.sources, a service is a source of kind remote"
        return ConfigError("task.reward", task_reward, rule, "reward.sources.remote.url")
    if any(isinstance(source, RuleSource) and source.name is None for source in sources.values()):
        return None
    rule = "has no effect: reward.sources has no rule that takes its function from here"
    return ConfigError("task.reward", task_reward, rule, "a source with `kind: rule` alone")


def optional_sources_are_compared_within_groups(config: Config) -> ConfigError | None:
    sources = reward_sources(config)
    optional = [name for name, source in sources.items() if source.optional]
    if not optional:
        return None
    key = source_key(config, optional[0], "optional")
    if len(optional) == len(sources):
        return ConfigError(
            key, True, "one source at least must not be optional, or nothing scores a sample", "false"
        )
    if config.algorithm.advantage in GROUP_RELATIVE:
        return None
    rule = (
        f"leaves a source out for single prompts, and advantage {config.algorithm.advantage} compares prompts with one "
        "another"
    )
    return ConfigError(key, True, rule, "false")


def _problems(config: Config, source: AnySource) -> Iterator[Problem]:
    match source:
        case RuleSource():
            yield from _rule_problems(source)
        case RemoteSource():
            yield from _remote_problems(source)
        case JudgeSource():
            yield from _model_problems(config, source)
            yield from _judge_problems(source)
        case _:
            yield from _model_problems(config, source)


def _rule_problems(source: RuleSource) -> Iterator[Problem]:
    if source.name is None:
        return
    if is_address(source.name):
        yield "name", source.name, "is an address, which a source of kind remote asks", "kind: remote"
    if source.name in ("auto", "reasoning_gym", "reasoning_gym_strict"):
        yield "name", source.name, "comes with the task: leave it out here and name it in task.reward", "null"


def _model_problems(config: Config, source: LoadedSource) -> Iterator[Problem]:
    if not source.path:
        yield "path", "", "must name a Hugging Face id or a local folder", None
    if source.host_between_uses and source.quantization != "none":
        yield "host_between_uses", True, "quantised weights stay where they were loaded", "false"
    if source.host_between_uses and config.cluster.num_devices > 1:
        yield "host_between_uses", True, "weights divided over ranks stay where they are", "false"
    if source.quantization != "none" and config.cluster.num_devices > 1:
        rule = "quantised weights cannot be divided over ranks"
        yield "quantization", source.quantization, rule, "none"


def _judge_problems(source: JudgeSource) -> Iterator[Problem]:
    if source.score_pattern is not None and source.score_key is not None:
        yield "score_key", source.score_key, "excludes score_pattern; keep one of them", "null"
    if source.score_pattern is not None:
        try:
            groups = re.compile(source.score_pattern).groups
        except re.error as error:
            yield "score_pattern", source.score_pattern, f"is not a regular expression: {error}", None
        else:
            if groups != 1:
                rule = f"must have one group, the score, and has {groups}"
                yield "score_pattern", source.score_pattern, rule, r"Score: ([0-9.]+)"
    if source.lowest is not None and source.highest is not None and source.lowest >= source.highest:
        yield "lowest", source.lowest, f"must be below highest = {source.highest:g}", None


def _remote_problems(source: RemoteSource) -> Iterator[Problem]:
    try:
        parts = urlsplit(source.url)
        port_is_valid = parts.port is None or parts.port > 0
    except ValueError as error:
        yield "url", source.url, f"is not an address: {error}", None
        return
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_valid:
        yield "url", source.url, "must be an http(s) address such as https://host/score", None
    elif parts.username is not None or parts.password is not None:
        shown = source.url.replace(parts.netloc.rpartition("@")[0], "***")
        yield (
            "url",
            shown,
            "must not hold a password: it would be written to config.yaml",
            "auth_env: VARIABLE",
        )
    elif parts.scheme == "http" and not is_loopback(source.url) and not source.allow_http:
        rule = "is another machine, and http sends prompts and answers readable to all on the way"
        nearest = f"https://{source.url.removeprefix('http://')}, or allow_http: true in reward.sources"
        yield "url", source.url, rule, nearest
    if not re.fullmatch(r"[A-Za-z0-9-]+", source.auth_header):
        yield "auth_header", source.auth_header, "must be the name of an HTTP header", "Authorization"


def ranks_share_conversations_of_a_model(config: Config) -> ConfigError | None:
    size = config.reward.sequence_parallel_size
    if size is None or any(isinstance(source, ModelSource) for source in config.reward.sources.values()):
        return None
    rule = "has no effect: no source of the reward is of kind model"
    return ConfigError("reward.sequence_parallel_size", size, rule, "null")


REWARD_RULES = (
    sources_are_well_formed,
    the_reward_has_one_home,
    optional_sources_are_compared_within_groups,
    ranks_share_conversations_of_a_model,
)
