"""The part of a run that plays episodes, where section `agent` asks for it."""

import importlib
import importlib.util
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from paceline.agents.counts import AgentCounts
from paceline.agents.episodes import EpisodeLimits, EpisodeLoop, last_answer
from paceline.agents.protocol import EpisodePlayer
from paceline.agents.tools import ToolPool, parameters_of, resolve_function, resolve_tools
from paceline.config import Config, ConfigError
from paceline.data.turns import TurnError, TurnRenderer
from paceline.rollout import NativeEngine, PagedEngine, RolloutEngine
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator
from paceline.types import Sample


def check_agent(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises `ConfigError` for what can be known before the model is loaded."""
    agent = config.agent
    if agent.program is not None:
        missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
        if missing:
            rule = f"needs {', '.join(missing)}: pip install 'paceline[serve]'"
            raise ConfigError("agent.program", agent.program, rule)
        resolve_function("agent.program", agent.program)
    if not agent.tools:
        return
    parameters_of(resolve_tools(agent.tools), agent.call_format)
    try:
        TurnRenderer(tokenizer).continuation((), [{"role": agent.output_role, "content": "1"}])
    except TurnError as error:
        raise ConfigError("agent.output_role", agent.output_role, str(error), "user") from error


def open_agent(
    config: Config,
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: frozenset[int],
    max_context: int,
    ledger: Ledger,
    log_path: Path,
) -> EpisodePlayer | None:
    """What plays this rank's episodes; None where samples are single answers. Close it."""
    agent = config.agent
    if not agent.is_on:
        return None
    assert isinstance(engine, NativeEngine | PagedEngine)  # a rule of the config says so
    if agent.program is not None:
        # by name: its server is an extra that other runs need not have
        programs = importlib.import_module("paceline.agents.programs")
        served = programs.ServedModel(config.run.name, tokenizer, stop_token_ids, max_context)
        player: EpisodePlayer = programs.ProgramLoop(
            engine, served, agent.program, agent.workers, agent.timeout_s, ledger, log_path
        )
        return player
    return EpisodeLoop(
        engine,
        tokenizer,
        TurnRenderer(tokenizer),
        ToolPool(agent.tools, agent.workers, agent.timeout_s, log_path),
        parameters_of(resolve_tools(agent.tools), agent.call_format),
        agent.call_format,
        agent.output_role,
        EpisodeLimits(agent.max_turns, agent.max_turn_tokens, agent.max_output_tokens),
        ledger,
    )


def completion_of(config: Config, tokenizer: PreTrainedTokenizerBase, sample: Sample) -> str:
    """What the reward function is given of a sample."""
    if not config.agent.tools or config.agent.reward_on == "episode":
        return sample.text
    return str(tokenizer.decode(list(last_answer(sample)), skip_special_tokens=True))


def record_agent(counts: AgentCounts, metrics: MetricAccumulator) -> None:
    """What happened in this rank's episodes."""
    metrics.add("agent/episodes", counts.num_episodes)
    if counts.num_episodes:
        metrics.add("agent/turns", counts.num_turns / counts.num_episodes, counts.num_episodes)
        metrics.add("agent/calls", counts.num_calls / counts.num_episodes, counts.num_episodes)
    metrics.add("agent/malformed_calls", counts.num_malformed)
    metrics.add("agent/errors", counts.num_errors)
    metrics.add("agent/timeouts", counts.num_timeouts)
    metrics.add("agent/outputs_cut", counts.num_outputs_cut)
    metrics.add("agent/out_of_turns", counts.num_out_of_turns)
    metrics.add("agent/out_of_room", counts.num_out_of_room)
    metrics.add("agent/inserted_tokens", counts.num_inserted_tokens)
    metrics.add("agent/branches_dropped", counts.num_branches_dropped)
    metrics.add("agent/without_turn", counts.num_without_turn)
    metrics.add("agent/tool_s", counts.tool_s)
