"""Prompts from files: .jsonl, .parquet, or a folder of them, one prompt per row.

Every refusal names the file, the row and the column. Rows are never skipped, except that a .jsonl file may hold empty
lines. Text is kept exactly as it stands in the file.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from paceline.config.errors import ConfigError

Message = Mapping[str, str]
"""A chat message: `role` and `content`."""

FileSplit = Literal["train", "evaluation"]

SUFFIXES = (".jsonl", ".parquet")

_SPLIT_PREFIXES: Mapping[FileSplit, tuple[str, ...]] = {
    "train": ("train",),
    "evaluation": ("test", "validation", "val", "eval", "dev"),
}


@dataclass(frozen=True, slots=True)
class Example:
    """One question before it is rendered. `where` says where it came from, for messages to people."""

    example_id: str
    question: str | tuple[Message, ...]
    answer: str | None
    where: str
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """Text by which two questions count as the same."""
        if isinstance(self.question, str):
            return self.question.strip()
        return json.dumps([[message["role"], message["content"].strip()] for message in self.question])


def find_files(path: str, split: FileSplit, key: str) -> list[Path]:
    """The data files at `path`, in the order of their names.

    A folder is searched with its subfolders. If some of its files are named after the split, as in the folders of
    Hugging Face data sets (`train-00000-of-00002.parquet`, `test.jsonl`), only those are taken, so that test rows are
    not trained on. Raises `ConfigError` for setting `key` when there is nothing to read.
    """
    place = Path(path).expanduser()
    if place.is_file():
        if place.suffix not in SUFFIXES:
            raise ConfigError(key, path, f"must be a folder or a file ending in {' or '.join(SUFFIXES)}")
        return [place]
    if not place.is_dir():
        raise ConfigError(key, path, "does not exist", _nearest_neighbour(place))
    files = sorted(file for file in place.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not files:
        raise ConfigError(key, path, f"holds no file ending in {' or '.join(SUFFIXES)}")
    return [file for file in files if file.name.startswith(_SPLIT_PREFIXES[split])] or files


def read_examples(
    files: list[Path], prompt_key: str, answer_key: str, id_prefix: str, path_key: str = "task.path"
) -> list[Example]:
    """All rows of `files` in order; ids count rows from 0 over all files.

    `prompt_key` and `answer_key` name columns, or fields within one as in `reward_model.ground_truth`. The other
    columns become `metadata`. A row without an answer has answer None; numbers and booleans become their text.
    `path_key` is the setting that a malformed file is blamed on. Raises `ConfigError`.
    """
    examples: list[Example] = []
    for file in files:
        for where, row in read_rows(file, path_key):
            question = question_of(_required(row, prompt_key, where), where)
            answer = text_of(lookup(row, answer_key), answer_key, where)
            metadata = {name: value for name, value in row.items() if name not in (prompt_key, answer_key)}
            examples.append(Example(f"{id_prefix}:{len(examples)}", question, answer, where, metadata))
    return examples


def nearest_column(example: Example, name: str) -> str | None:
    """The remaining column of a row that comes closest to `name`."""
    close = difflib.get_close_matches(name, example.metadata, n=1)
    return close[0] if close else None


def read_rows(file: Path, path_key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Pairs `(file:line or file row n, row)`; lines count from 1, parquet rows from 0."""
    if file.suffix == ".parquet":
        yield from _read_parquet(file, path_key)
        return
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(path_key, where, f"is not JSON in UTF-8 ({error})") from error
            if not isinstance(row, dict):
                raise ConfigError(path_key, where, f"must be a JSON object, is a {type(row).__name__}")
            yield where, row


def _read_parquet(file: Path, path_key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        table = pq.ParquetFile(file)
        number = 0
        for batch in table.iter_batches():
            for row in batch.to_pylist():
                yield f"{file} row {number}", row
                number += 1
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(path_key, str(file), f"is not a readable parquet file ({error})") from error


def lookup(row: Mapping[str, Any], key: str) -> Any:
    """The value at `key`, a column or a dotted path into one; None when it is not there."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _required(row: Mapping[str, Any], key: str, where: str) -> Any:
    value = lookup(row, key)
    if value is None:
        if key in row:
            raise ConfigError("task.prompt_key", key, f"the prompt in {where} is null")
        close = difflib.get_close_matches(key, row, n=1) or list(row)[:1]
        rule = f"{where} has no such column; it has {', '.join(row) or 'none'}"
        raise ConfigError("task.prompt_key", key, rule, close[0] if close else None)
    return value


def question_of(value: Any, where: str) -> str | tuple[Message, ...]:
    """A prompt column's value: text, or chat messages that end with a turn to answer. Raises `ConfigError`."""
    if isinstance(value, str):
        if not value.strip():
            raise ConfigError("task.prompt_key", value, f"the prompt in {where} is empty")
        return value
    if not isinstance(value, list) or not value:
        rule = f"the prompt in {where} must be text or a list of chat messages, is {type(value).__name__}"
        raise ConfigError("task.prompt_key", value, rule)
    messages = tuple(_message(message, where) for message in value)
    if messages[-1]["role"] == "assistant":
        rule = f"the last message in {where} is the assistant's, which leaves nothing to answer"
        raise ConfigError("task.prompt_key", "assistant", rule, "user")
    return messages


def _message(message: Any, where: str) -> Message:
    match message:
        case {"role": str(role), "content": str(content)}:
            return {"role": role, "content": content}
    rule = f"a chat message in {where} must have a text `role` and a text `content`"
    raise ConfigError("task.prompt_key", message, rule)


def text_of(value: Any, key: str, where: str, setting: str = "task.answer_key") -> str | None:
    """An answer column's value as text, None where there is none; `setting` is blamed for anything else."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float)):
        return str(value)
    rule = f"the answer in {where} must be text or a number, is {type(value).__name__}; name a field as column.field"
    nested = f"{key}.{next(iter(value))}" if isinstance(value, Mapping) and value else None
    raise ConfigError(setting, key, rule, nested)


def _nearest_neighbour(place: Path) -> str | None:
    if not place.parent.is_dir():
        return None
    close = difflib.get_close_matches(place.name, [entry.name for entry in place.parent.iterdir()], n=1)
    return str(place.parent / close[0]) if close else None
