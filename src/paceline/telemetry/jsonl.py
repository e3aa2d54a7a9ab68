"""JSON lines that survive a kill: append without joining a torn line, read with torn lines counted."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

T = TypeVar("T")

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def open_append(path: Path) -> IO[str]:
    """Opens for appending, folders made; a line a killed process left half-written is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torn = path.exists() and path.stat().st_size > 0 and not _ends_with_newline(path)
    file = path.open("a", encoding="utf-8")
    if torn:
        file.write("\n")
    return file


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def read_lines(path: Path, skip: Callable[[str], bool] | None = None) -> Iterator[dict[str, Any] | None]:
    """Every record in order; None for a line that is no JSON object, which is a torn one.

    Lines that `skip` says yes to are not parsed and left out; it is not asked about the line after a torn one, which
    tells whether a new process began.
    """
    is_after_torn = False
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if skip is not None and not is_after_torn and skip(line):
                continue
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            is_after_torn = not isinstance(record, dict)
            yield None if is_after_torn else record


def current_steps(records: Iterable[T], step_of: Callable[[T], int]) -> list[T]:
    """The records that count, in order of steps: one of step n replaces all recorded before it with a step >= n.

    A resumed run goes back to its checkpoint. Steps that the earlier process did beyond it belong to weights that are
    no more, also those that the later process has not come to yet.
    """
    current: list[T] = []
    for record in records:
        while current and step_of(current[-1]) >= step_of(record):
            current.pop()
        current.append(record)
    return current


def encode_number(value: float) -> float | int | str:
    """JSON has no NaN and no infinity: they become the texts "nan", "inf" and "-inf"."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def decode_number(value: float | int | str) -> float:
    """The inverse of `encode_number`.

    Raises:
        ValueError: a text that is none of the three.
    """
    if isinstance(value, str):
        if value not in _NOT_FINITE:
            raise ValueError(f"{value!r} is no number; texts may be {', '.join(_NOT_FINITE)}")
        return _NOT_FINITE[value]
    return float(value)
