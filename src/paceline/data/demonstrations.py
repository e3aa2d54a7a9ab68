"""Conversations to learn from, before they are rendered: read from files, or made of solved reasoning-gym questions.

A row of a file is a conversation (column `sft.messages_key`) or a question with its answer (`task.prompt_key` and
`sft.response_key`). Held-out rows are split off as those of a task are, by a hash of what comes before the answer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config.errors import ConfigError
from paceline.config.schema import Config
from paceline.data.prompts import Example, Message, find_files, lookup, question_of, read_rows, text_of
from paceline.data.splitting import split_rows
from paceline.data.tasks import files_read, gym_questions

RESPONSE_KEYS = ("completion", "response", "answer")
"""Columns taken for the answer, in this order, where `sft.response_key` names none."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One conversation: either `messages` as they stand, or a question (`example`) whose answer is learned.

    `where` says where it came from, for messages to people.
    """

    row_id: str
    where: str
    messages: tuple[Message, ...] | None = None
    example: Example | None = None

    @property
    def identity(self) -> str:
        """What comes before the first answer; two rows that share it are never on both sides of a split."""
        if self.example is not None:
            return self.example.identity
        assert self.messages is not None
        turns = [[message["role"], message["content"].strip()] for message in self.messages]
        first = next(index for index, (role, _) in enumerate(turns) if role == "assistant")
        return json.dumps(turns[:first])


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Training and held-out conversations; `shown` are the worked examples put before each question.

    `num_duplicates` counts training rows left out because a held-out or shown row has the same question.
    """

    train: list[Demonstration]
    evaluation: list[Demonstration]
    shown: list[Example]
    num_duplicates: int
    notes: tuple[str, ...]


def read_demonstrations(config: Config) -> Demonstrations:
    """Reads or draws the rows and splits them. Raises `ConfigError` when there is nothing to learn from."""
    if config.task.name is None:
        return _from_files(config)
    questions = gym_questions(config)
    return Demonstrations(
        [Demonstration(e.example_id, e.where, example=e) for e in questions.train],
        [Demonstration(e.example_id, e.where, example=e) for e in questions.evaluation],
        questions.shown,
        questions.num_duplicates,
        questions.notes,
    )


def _from_files(config: Config) -> Demonstrations:
    task = config.task
    assert task.path is not None
    files = find_files(task.path, "train", "task.path")
    rows = _read(config, files, "row", "task.path")
    if not rows:
        raise ConfigError("task.path", task.path, "holds no rows, so nothing could be learned")
    notes = [files_read(task.path, files)]
    held_out: list[Demonstration] | None = None
    if task.eval_path is not None and task.eval_size:
        eval_files = find_files(task.eval_path, "evaluation", "task.eval_path")
        held_out = _read(config, eval_files, "eval", "task.eval_path")
        if not held_out:
            raise ConfigError("task.eval_path", task.eval_path, "holds no rows, so nothing could be measured")
        notes.append(files_read(task.eval_path, eval_files))
    split = split_rows(config, rows, held_out)
    shown = [row.example for row in split.shown if row.example is not None]  # conversations are never shown
    return Demonstrations(split.train, split.evaluation, shown, split.num_duplicates, tuple(notes))


def _read(config: Config, files: Sequence[Path], id_prefix: str, path_key: str) -> list[Demonstration]:
    found: list[Demonstration] = []
    for file in files:
        for where, row in read_rows(file, path_key):
            found.append(_demonstration(config, f"{id_prefix}:{len(found)}", where, row))
    return found


def _demonstration(config: Config, row_id: str, where: str, row: Mapping[str, Any]) -> Demonstration:
    if (value := lookup(row, config.sft.messages_key)) is not None:
        return Demonstration(row_id, where, messages=_conversation(config, value, where))
    prompt = lookup(row, config.task.prompt_key)
    if prompt is None:
        rule = (
            f"{where} has neither this column nor task.prompt_key = {config.task.prompt_key!r}; "
            f"it has {', '.join(row) or 'none'}"
        )
        raise ConfigError("sft.messages_key", config.sft.messages_key, rule)
    question, answer = question_of(prompt, where), _answer(config, row, where)
    return Demonstration(row_id, where, example=Example(row_id, question, answer, where))


def _answer(config: Config, row: Mapping[str, Any], where: str) -> str:
    keys = RESPONSE_KEYS if config.sft.response_key is None else (config.sft.response_key,)
    key = next((key for key in keys if lookup(row, key) is not None), None)
    if key is None:
        missing = f"no column {' or '.join(keys)} to learn from, or null in it"
        rule = f"{where} has {missing}; it has {', '.join(row)}"
        raise ConfigError("sft.response_key", config.sft.response_key, rule)
    value = lookup(row, key)
    if isinstance(value, list) and len(value) == 1:
        match value[0]:  # how TRL writes the completion of a prompt that is a list of messages
            case {"role": "assistant", "content": str(content)}:
                return content
    answer = text_of(value, key, where, "sft.response_key")
    assert answer is not None
    return answer


def _conversation(config: Config, value: Any, where: str) -> tuple[Message, ...]:
    key, task = config.sft.messages_key, config.task
    for name, setting in (
        ("instruction", task.instruction),
        ("system_prompt", task.system_prompt),
        ("num_examples", task.num_examples),
    ):
        if setting:
            rule = f"has no effect on whole conversations, which are taken as they stand ({where})"
            raise ConfigError(f"task.{name}", setting, rule, "0" if name == "num_examples" else "null")
    if not isinstance(value, list) or not value:
        rule = f"{where} must hold a list of chat messages here, holds {type(value).__name__}"
        raise ConfigError("sft.messages_key", key, rule)
    messages: list[Message] = []
    for message in value:
        match message:
            case {"role": str(role), "content": str(content)}:
                messages.append({"role": role, "content": content})
            case _:
                rule = f"a chat message in {where} must have a text `role` and a text `content`"
                raise ConfigError("sft.messages_key", message, rule)
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise ConfigError("sft.messages_key", key, f"{where} has no assistant turn, so nothing to learn from")
    if roles[0] == "assistant":
        raise ConfigError("sft.messages_key", key, f"{where} begins with the assistant, who answers nothing")
    return tuple(messages)
