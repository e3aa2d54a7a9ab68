"""Which questions are held out, which are shown as worked examples, and which are left to train on."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

from paceline.config.errors import ConfigError
from paceline.config.schema import Config
from paceline.data.seeds import child_seed

HELD_OUT_SEED = 0
"""Held-out prompts and worked examples hang from this and not from the run's seed, so that runs with different seeds
are measured on the same questions and see the same prompt format."""


class Identified(Protocol):
    """Anything with a text by which two of its kind count as the same."""

    @property
    def identity(self) -> str:
        """That text."""
        ...


R = TypeVar("R", bound=Identified)


@dataclass(frozen=True, slots=True)
class Split(Generic[R]):
    """Rows of which no question is in more than one list.

    `num_duplicates` counts those in none: a held-out or shown row has the same question.
    """

    train: list[R]
    evaluation: list[R]
    shown: list[R]
    num_duplicates: int


def split_rows(config: Config, rows: Sequence[R], held_out: list[R] | None = None) -> Split[R]:
    """Splits the rows of `task.path`; `held_out` are those of `task.eval_path`, where it is used.

    Rows are taken by a hash of the question, so that the split depends neither on the seed nor on their order.

    Raises:
        ConfigError: nothing would be left to train on, or too little to show.
    """
    task = config.task
    ranked = sorted(rows, key=lambda row: child_seed(HELD_OUT_SEED, "split", row.identity))
    evaluation = _distinct(ranked, task.eval_size, set()) if held_out is None else held_out
    taken = {row.identity for row in evaluation}
    shown = _distinct(ranked, task.num_examples, taken)
    taken |= {row.identity for row in shown}
    train = [row for row in rows if row.identity not in taken]
    if not train or len(shown) < task.num_examples:
        others = {row.identity for row in held_out or ()}
        rows_by_question = Counter(row.identity for row in ranked if row.identity not in others)
        has = f"{task.path} has only {len(rows_by_question)} different questions"
        has += " beside those of task.eval_path" if held_out else ""
        raise nothing_left(config, has, list(rows_by_question.values()), is_eval_file=bool(held_out))
    num_set_aside = len(shown) + (len(evaluation) if held_out is None else 0)
    return Split(train, evaluation, shown, len(rows) - len(train) - num_set_aside)


def nothing_left(
    config: Config, has: str, rows_by_question: Sequence[int], *, is_eval_file: bool = False
) -> ConfigError:
    """The refusal where setting questions aside leaves none to train on; its nearest value leaves a batch, or else one.

    `has` says how many different questions there are; `rows_by_question` holds the rows of each, in the order in which
    they are held out, then shown. Questions held out from a file of their own (`is_eval_file`) are not among them.
    """
    task = config.task
    num_held_out = 0 if is_eval_file else task.eval_size
    rule = f"{has}: with {num_held_out} held out and {task.num_examples} shown none is left to train on"
    for num_trained in (config.batch.num_prompts, 1):
        most = _most_set_aside(rows_by_question, num_trained)
        if num_held_out and most >= task.num_examples:
            return ConfigError("task.eval_size", task.eval_size, rule, str(most - task.num_examples))
        if task.num_examples and most >= num_held_out:
            return ConfigError("task.num_examples", task.num_examples, rule, str(most - num_held_out))
    if is_eval_file:
        return ConfigError("task.eval_path", task.eval_path, rule)
    return ConfigError("task.eval_size", task.eval_size, rule)


def _most_set_aside(rows_by_question: Sequence[int], num_trained: int) -> int:
    """How many questions, from the first on, may be set aside for `num_trained` rows to be left; -1 if none may."""
    rows_of_last = list(accumulate(reversed(rows_by_question)))
    return len(rows_of_last) - 1 - bisect_left(rows_of_last, num_trained)


def _distinct(rows: Sequence[R], count: int, taken: set[str]) -> list[R]:
    """The first `count` rows with different questions that are not in `taken`."""
    chosen: dict[str, R] = {}
    for row in rows:
        if len(chosen) == count:
            break
        if row.identity not in taken:
            chosen.setdefault(row.identity, row)
    return list(chosen.values())
