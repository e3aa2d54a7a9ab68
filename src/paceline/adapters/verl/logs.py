"""verl's loggers read back: console lines, the JSONL file logger, TensorBoard event files."""

import importlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from paceline.config.errors import ConfigError

EVENT_FILES = "events.out.tfevents."

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_STEP_LINE = re.compile(r"(?:^|\s)step:(\d+) - (.*)$")
_NUMPY = re.compile(r"^np\.\w+\((.*)\)$")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")


@dataclass(slots=True)
class Log:
    """Metrics by step as they were logged, with the Unix time of each step's line where it is known.

    `num_unread` counts pairs that are no number; `num_replaced` steps that were logged again after a resume.
    """

    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    unix_s: dict[int, float] = field(default_factory=dict)
    num_unread: int = 0
    num_torn_lines: int = 0
    num_replaced: int = 0

    def put(self, step: int, metrics: dict[str, float]) -> None:
        """Takes a step's line. A step that was there already was done again after a resume: what came after it does
        not count any more."""
        if step in self.metrics and self.metrics[step].keys() & metrics.keys():
            for later in [one for one in self.metrics if one >= step]:
                del self.metrics[later]
                self.num_replaced += 1
        self.metrics.setdefault(step, {}).update(metrics)


def read_console(path: Path) -> Log:
    """`step:N - name:value - ...` lines among whatever else a terminal shows, Ray's prefixes and colours left out."""
    log = Log()
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            match = _STEP_LINE.search(_REPEATED.sub("", _ANSI.sub("", line.rstrip())))
            if match is None:
                continue
            metrics: dict[str, float] = {}
            for pair in match.group(2).split(" - "):
                name, _, text = pair.strip().rpartition(":")
                value = parse_number(text)
                if name and value is not None:
                    metrics[name] = value
                else:
                    log.num_unread += 1
            log.put(int(match.group(1)), metrics)
    return log


def parse_number(text: str) -> float | None:
    """A number as `pformat` prints it, NumPy's included; None when it is none."""
    text = text.strip()
    if match := _NUMPY.match(text):
        text = match.group(1).strip("'\"")
    if text in ("True", "False"):
        return float(text == "True")
    try:
        return float(text)
    except ValueError:
        return None


def read_file_logger(path: Path) -> Log:
    """The JSONL of verl's `file` logger: `{"step": n, "data": {...}}` a line."""
    log = Log()
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict) or not isinstance(record.get("data"), dict):
                log.num_torn_lines += 1
                continue
            metrics = {
                name: number
                for name, value in record["data"].items()
                if (number := _number(value)) is not None
            }
            log.num_unread += len(record["data"]) - len(metrics)
            log.put(int(record["step"]), metrics)
    return log


def _number(value: Any) -> float | None:
    if isinstance(value, int | float):
        return float(value)
    return parse_number(value) if isinstance(value, str) else None


def read_tensorboard(folder: Path) -> Log:
    """All event files in one folder; a later value of the same step and tag wins.

    Raises:
        ConfigError: the tensorboard package is not installed.
    """
    accumulator = _tensorboard(folder).EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    log = Log()
    for tag in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(tag):
            log.metrics.setdefault(event.step, {})[tag] = event.value
            log.unix_s[event.step] = max(event.wall_time, log.unix_s.get(event.step, 0.0))
    return log


def _tensorboard(folder: Path) -> ModuleType:
    # an extra, so that it is imported only when there are event files to read
    try:
        return importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    except ModuleNotFoundError as error:
        rule = "event files need tensorboard: pip install 'paceline[tensorboard]'"
        raise ConfigError("PATH", str(folder), rule) from error


def find_logs(path: Path) -> dict[str, list[Path]]:
    """Log files at `path` by kind: `file` (JSONL), `tensorboard` (folders), `console`.

    Raises:
        ConfigError: there is no such path.
    """
    if path.is_file():
        return {_kind(path): [path.parent if path.name.startswith(EVENT_FILES) else path]}
    if not path.is_dir():
        raise ConfigError("PATH", str(path), "there is no such file or folder")
    found: dict[str, list[Path]] = {"file": [], "tensorboard": [], "console": []}
    for file in sorted(one for one in path.rglob("*") if one.is_file()):
        kind = _kind(file)
        place = file.parent if kind == "tensorboard" else file
        if (kind != "console" or file.suffix in (".log", ".txt", ".out", "")) and place not in found[kind]:
            found[kind].append(place)
    return found


def _kind(path: Path) -> str:
    if path.name.startswith(EVENT_FILES):
        return "tensorboard"
    return "file" if path.suffix in (".jsonl", ".json") else "console"


def merged(logs: Iterable[Log]) -> Log:
    """One log from several of the same run; what an earlier one says of a metric is kept."""
    result = Log()
    for log in logs:
        for step, metrics in log.metrics.items():
            present = result.metrics.setdefault(step, {})
            present.update({name: value for name, value in metrics.items() if name not in present})
        result.unix_s = {**log.unix_s, **result.unix_s}
        result.num_unread += log.num_unread
        result.num_torn_lines += log.num_torn_lines
        result.num_replaced += log.num_replaced
    return result


def finite(metrics: dict[str, float], name: str) -> float | None:
    """The metric when it is there and finite."""
    value = metrics.get(name, math.nan)
    return value if math.isfinite(value) else None
