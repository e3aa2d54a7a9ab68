"""Rules of section `agent`. Each is one function: a config in, the problem (or None) out."""

from paceline.config.decisions import shares_weights
from paceline.config.errors import ConfigError
from paceline.config.schema import Config


def agents_have_one_source(config: Config) -> ConfigError | None:
    agent = config.agent
    if agent.tools and agent.program is not None:
        rule = "excludes agent.tools: a program brings its own tools"
        return ConfigError("agent.program", agent.program, rule, "null")
    for tool in agent.tools:
        module, colon, function = tool.partition(":")
        if not (module and colon and function):
            return ConfigError("agent.tools", tool, "a tool is named `module:function`")
    return None


def agent_settings_act(config: Config) -> ConfigError | None:
    """Settings of episodes without episodes, of tools without tools.

    A default written out changes nothing and is none: the config.yaml of a run holds every key, and is read again.
    """
    set_here = config.agent.model_dump(exclude_defaults=True).keys() - {"tools", "program"}
    if set_here and not config.agent.is_on:
        rule = f"must name a tool (or agent.program a program) for agent.{min(set_here)} to act"
        return ConfigError("agent.tools", (), rule, "paceline.agents.calculator:calculator")
    tools_only = set_here & {
        "call_format",
        "output_role",
        "max_turns",
        "max_turn_tokens",
        "max_output_tokens",
    }
    if config.agent.program is not None and tools_only:
        key = min(tools_only)
        rule = "has no effect with agent.program, which plays its own turns"
        return ConfigError(f"agent.{key}", getattr(config.agent, key), rule)  # a field of the section by name
    return None


def episodes_need_a_chat_template(config: Config) -> ConfigError | None:
    if config.agent.is_on and not config.task.use_chat_template:
        rule = "episodes have turns, which only a chat template can write"
        return ConfigError("task.use_chat_template", False, rule, "true")
    return None


def episodes_need_rounds(config: Config) -> ConfigError | None:
    if config.agent.is_on and not shares_weights(config):
        rule = "episodes are driven round by round, which the native engine of the trainer's process offers"
        key = "rollout.engine" if config.rollout.engine != "native" else "rollout.num_replicas"
        value = config.rollout.engine if config.rollout.engine != "native" else config.rollout.num_replicas
        return ConfigError(key, value, rule, "native" if key == "rollout.engine" else "1")
    return None


def answers_end_where_tools_are_called(config: Config) -> ConfigError | None:
    if config.agent.tools and config.rollout.ignore_eos:
        rule = "never ends an answer, and a tool is called when one ends"
        return ConfigError("rollout.ignore_eos", True, rule, "false")
    return None


def examples_are_messages(config: Config) -> ConfigError | None:
    for message in config.agent.examples:
        if set(message) != {"role", "content"}:
            return ConfigError("agent.examples", message, "each message has a role and a content")
    return None


def turns_fit_the_episode(config: Config) -> ConfigError | None:
    agent, limit = config.agent, config.rollout.max_new_tokens
    if agent.tools and agent.max_turn_tokens is not None and agent.max_turn_tokens > limit:
        rule = f"is beyond rollout.max_new_tokens = {limit}, which bounds the whole episode"
        return ConfigError("agent.max_turn_tokens", agent.max_turn_tokens, rule, str(limit))
    return None


AGENT_RULES = (
    agents_have_one_source,
    agent_settings_act,
    episodes_need_a_chat_template,
    episodes_need_rounds,
    answers_end_where_tools_are_called,
    examples_are_messages,
    turns_fit_the_episode,
)
