"""Tools: users' functions, found by name, run in processes that can be killed."""

import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.agents.calls import ToolCall
from paceline.config.errors import ConfigError
from paceline.rewards.functions import make_working_folder_importable
from paceline.rewards.pool import PendingScore, RewardPool
from paceline.types import RewardJob, RewardSpec, Verdict

TOOL_JOBS = "paceline.agents.tools:tool_jobs"
PROGRAM_JOBS = "paceline.agents.tools:program_jobs"


def resolve_function(key: str, spec: str) -> Callable[..., Any]:
    """The function that `module:function` names.

    Raises:
        ConfigError: for the setting `key`, when it cannot be imported or is no function.
    """
    module_name, _, name = spec.partition(":")
    if module_name == "__main__":
        rule = "worker processes cannot import `__main__`; put the function into a module of its own"
        raise ConfigError(key, spec, rule)
    make_working_folder_importable()
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything; every kind is the same refusal
        rule = f"importing {module_name!r} failed: {type(error).__name__}: {error}"
        raise ConfigError(key, spec, rule) from error
    function = vars(module).get(name)
    if not callable(function):
        raise ConfigError(key, spec, f"module {module_name!r} has no function {name!r}")
    return function


def resolve_tools(specs: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Functions by the tools' names. Raises `ConfigError` as `resolve_function` does, and for a name used twice."""
    found: dict[str, Callable[..., Any]] = {}
    for spec in specs:
        name = spec.partition(":")[2]
        if name in found:
            raise ConfigError("agent.tools", spec, f"two tools are called {name!r}")
        found[name] = resolve_function("agent.tools", spec)
    return found


def parameters_of(tools: Mapping[str, Callable[..., Any]], call_format: str) -> dict[str, list[str]]:
    """Names of each tool's parameters.

    Raises:
        ConfigError: the call format writes one argument, and a tool takes another number.
    """
    found = {name: list(inspect.signature(function).parameters) for name, function in tools.items()}
    for name, parameters in found.items():
        if call_format == "tag" and len(parameters) != 1:
            rule = f"the format has room for one argument, and {name} takes {len(parameters)}"
            raise ConfigError("agent.call_format", call_format, rule, "json")
    return found


def tool_jobs(tools: Sequence[str]) -> Callable[[RewardJob], str]:
    """What a worker runs: a job whose metadata names a tool and its arguments gives the tool's output as text."""
    functions = resolve_tools(tools)

    def run(job: RewardJob) -> str:
        result = functions[job.metadata["name"]](**job.metadata["arguments"])
        return result if isinstance(result, str) else json.dumps(result, default=str)

    return run


def program_jobs(program: str) -> Callable[[RewardJob], str]:
    """What a worker runs: a job whose metadata are the program's arguments plays one episode. The program's result, if
    it has one, is the episode's completion."""
    function = resolve_function("agent.program", program)

    def run(job: RewardJob) -> str:
        result = function(**job.metadata)
        return "" if result is None else str(result)

    return run


class ToolPool:
    """Processes that run calls. A call that takes longer than `timeout_s` has its process killed and replaced."""

    def __init__(
        self, tools: Sequence[str], num_workers: int, timeout_s: float, log_path: Path | None = None
    ) -> None:
        spec = RewardSpec(TOOL_JOBS, {"tools": tuple(tools)})
        self._timeout_s = timeout_s
        self._pool = RewardPool(spec, num_workers, timeout_s, log_path, gives_text=True)

    def submit(self, call: ToolCall) -> PendingScore:
        """Queues a call and returns at once."""
        metadata = {"name": call.name, "arguments": dict(call.arguments)}
        return self._pool.submit(RewardJob("", "", None, metadata))

    def output(self, verdict: Verdict) -> str:
        """What the model is told."""
        if verdict.outcome == "score":
            return verdict.message
        if verdict.outcome == "timeout":
            return f"Error: no result within {self._timeout_s:g} s"
        # without the place in the source, which says nothing to the model
        return f"Error: {verdict.message.rpartition(' (')[0] or verdict.message}"

    def close(self) -> None:
        """Ends the processes."""
        self._pool.close()
