"""From the name of a reward to the function: built-in ones, and users' own as `module:function`.

A user's function is `f(completion: str, *, answer, metadata, prompt) -> float`. It may take fewer of the three
keywords: `f(completion)` and `f(completion, answer)` work as well. It returns a finite number; anything else, and
any exception, makes the sample's verdict an error, not a zero. A reward that asks a remote service and finds it down
should raise: the sample then counts as having no verdict, and says nothing about the policy.

Nothing here imports torch, and a built-in's own libraries are imported only when that built-in is named, because
every worker process pays for its imports at start.
"""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from paceline.config.errors import ConfigError
from paceline.types import RewardSpec

KEY = "task.reward"

BUILTINS: Mapping[str, str] = {
    "exact_match": "paceline.rewards.builtin.exact:exact_match",
    "reasoning_gym": "paceline.rewards.builtin.gym:reasoning_gym",
    "reasoning_gym_strict": "paceline.rewards.builtin.gym:reasoning_gym_strict",
    "math": "paceline.rewards.builtin.math:math",
}
"""Built-in name to the factory that makes its function from the spec's `params`."""

CONTEXT_NAMES = ("answer", "metadata", "prompt")


class RewardFunction(Protocol):
    """Score of one completion; see the module's text for what may be returned or raised."""

    def __call__(
        self, completion: str, *, answer: str | None, metadata: Mapping[str, Any], prompt: str
    ) -> float:
        """The score."""
        ...


def resolve(spec: RewardSpec) -> RewardFunction:
    """The function a spec names, imported and checked.

    Called in the main process before any rollout, and in every worker. Raises `ConfigError` for `task.reward` when
    the name is unknown, a module or function cannot be imported, or its parameters are not the contract's.
    """
    if spec.name in BUILTINS:
        factory = _import_object(spec.name, BUILTINS[spec.name])
        return factory(**spec.params)
    module_name, colon, function_name = spec.name.partition(":")
    if not colon or not module_name or not function_name:
        close = difflib.get_close_matches(spec.name, BUILTINS, n=1)
        rule = f"must be one of {', '.join(BUILTINS)}, or `module:function`"
        raise ConfigError(KEY, spec.name, rule, close[0] if close else None)
    if module_name == "__main__":
        rule = "worker processes cannot import `__main__`; put the function into a module of its own"
        raise ConfigError(KEY, spec.name, rule)
    make_working_folder_importable()
    function = _import_object(spec.name, spec.name)
    if not callable(function):
        raise ConfigError(KEY, spec.name, f"is a {type(function).__name__}, not a function")
    return adapt(spec.name, function)


def adapt(name: str, function: Callable[..., Any]) -> RewardFunction:
    """Gives a user's function the full signature by leaving out the keywords it does not take.

    Raises `ConfigError` when it takes no completion or demands something the contract does not offer.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise ConfigError(KEY, name, f"has no signature to read ({error})") from error
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in (*positional, inspect.Parameter.VAR_POSITIONAL):
        raise ConfigError(KEY, name, "must take the completion as its first argument")
    rest = parameters[1:]
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in rest)
    by_name = {p.name for p in rest if p.kind in (positional[1], inspect.Parameter.KEYWORD_ONLY)}
    for parameter in rest:
        variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if variadic or parameter.default is not inspect.Parameter.empty:
            continue
        if parameter.name not in CONTEXT_NAMES or parameter.name not in by_name:
            close = difflib.get_close_matches(parameter.name, CONTEXT_NAMES, n=1)
            rule = f"demands {parameter.name!r}; a reward takes (completion, *, answer, metadata, prompt)"
            raise ConfigError(KEY, name, rule, close[0] if close else None)
    passed = tuple(key for key in CONTEXT_NAMES if takes_all or key in by_name)

    def adapted(completion: str, *, answer: str | None, metadata: Mapping[str, Any], prompt: str) -> float:
        context = {"answer": answer, "metadata": metadata, "prompt": prompt}
        return function(completion, **{key: context[key] for key in passed})

    return adapted


def _import_object(name: str, path: str) -> Any:
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    # A module of the user's may raise anything while it is imported; every kind is the same refusal.
    except Exception as error:
        rule = f"importing {module_name!r} failed: {type(error).__name__}: {error}"
        raise ConfigError(KEY, name, rule) from error
    if attribute not in vars(module):
        functions = [key for key, value in vars(module).items() if callable(value)]
        close = difflib.get_close_matches(attribute, functions, n=1)
        rule = f"module {module_name!r} has no {attribute!r}"
        raise ConfigError(KEY, name, rule, f"{module_name}:{close[0]}" if close else None)
    return vars(module)[attribute]


def make_working_folder_importable() -> None:
    """Lets users' modules be imported from the folder a command is called in."""
    # An installed command's import path starts with its own folder, not with the one it is called from.
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
