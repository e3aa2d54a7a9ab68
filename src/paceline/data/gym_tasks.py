"""Questions drawn from reasoning-gym tasks, all different from one another."""

import dataclasses
import difflib
from collections.abc import Mapping
from enum import Enum
from typing import Any

from paceline.config.errors import ConfigError
from paceline.config.task_library import import_reasoning_gym, refuse_without_solver
from paceline.data.prompts import Example
from paceline.data.seeds import child_seed

MAX_ROUNDS = 20
"""Draws are repeated with new seeds at most so often when questions come up twice."""

_NUM_SEEDS = 2**31
"""Some tasks hand their seed plus an index to a generator that takes at most 32 bits."""


def gym_params(name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """`params` as the task's own config takes them: names become enum members, lists become tuples.

    Raises `ConfigError` for an unknown task or parameter (with the nearest), a value the task refuses, or a task
    whose packages are not installed.
    """
    datasets = import_reasoning_gym("task.name", name).factory.DATASETS
    if name not in datasets:
        close = difflib.get_close_matches(name, datasets, n=3, cutoff=0.4)
        raise ConfigError("task.name", name, "is no reasoning-gym task", " or ".join(close) or None)
    refuse_without_solver("task.name", name)
    fields = {field.name: field for field in dataclasses.fields(datasets[name][1])}
    converted: dict[str, Any] = {}
    for key, value in params.items():
        if key in ("seed", "size"):
            rule = "is set for you" if key == "seed" else "is set by task.size and task.eval_size"
            raise ConfigError(f"task.params.{key}", value, rule, "run.seed" if key == "seed" else "task.size")
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1) or [next(iter(fields))]
            raise ConfigError(f"task.params.{key}", value, f"is no parameter of {name}", close[0])
        converted[key] = _like_default(f"task.params.{key}", value, fields[key].default)
    _create(name, converted, seed=0, size=1)
    return converted


def draw_examples(
    name: str, params: Mapping[str, Any], count: int, seed: int, id_prefix: str, taken: set[str]
) -> tuple[list[Example], int]:
    """Up to `count` questions whose `identity` is not in `taken`, and how many repeated ones were passed over.

    Adds theirs to `taken`. Fewer come back only when the task runs out: a whole round (or `MAX_ROUNDS`) brought
    nothing new.
    """
    examples: list[Example] = []
    num_repeated = 0
    if not count:  # some tasks refuse a data set of no size
        return examples, num_repeated
    for round_number in range(MAX_ROUNDS):
        num_before = len(examples)
        dataset = _create(name, params, child_seed(seed, "round", round_number) % _NUM_SEEDS, count)
        for index in range(count):
            entry = dataset[index]
            where = f"{name} question {round_number * count + index}"
            metadata = {"dataset": name, "entry": entry}
            example = Example(
                f"{id_prefix}:{len(examples)}", entry["question"].strip(), entry["answer"], where, metadata
            )
            if example.identity in taken:
                num_repeated += 1
                continue
            taken.add(example.identity)
            examples.append(example)
            if len(examples) == count:
                return examples, num_repeated
        if len(examples) == num_before:
            break
    return examples, num_repeated


def _create(name: str, params: Mapping[str, Any], seed: int, size: int) -> Any:
    gym = import_reasoning_gym("task.name", name)
    try:
        return gym.create_dataset(name, seed=seed, size=size, **params)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError("task.params", dict(params), f"{name} refuses them: {error}") from error


def _like_default(key: str, value: Any, default: Any) -> Any:
    if isinstance(default, Enum) and isinstance(value, str):
        kind = type(default)
        names = [str(member.value) for member in kind]
        if value not in names:
            close = difflib.get_close_matches(value, names, n=1)
            rule = f"must be one of {', '.join(names)}"
            raise ConfigError(key, value, rule, close[0] if close else names[0])
        return kind(value)
    return tuple(value) if isinstance(default, tuple) and isinstance(value, list) else value
