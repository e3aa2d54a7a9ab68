"""verl's loggers read back: console lines and the JSONL file logger."""

import json
import re
from pathlib import Path
from typing import Any

from paceline.adapters.run.logs import EVENT_FILES, Log
from paceline.config.errors import ConfigError

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_STEP_LINE = re.compile(r"(?:^|\s)step:(\d+) - (.*)$")
_NUMPY = re.compile(r"^np\.\w+\((.*)\)$")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")


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
        if kind == "file" and file.stem.isdigit():
            continue  # a rollout dump, which is long
        place = file.parent if kind == "tensorboard" else file
        if (kind != "console" or file.suffix in (".log", ".txt", ".out", "")) and place not in found[kind]:
            found[kind].append(place)
    return found


def _kind(path: Path) -> str:
    if path.name.startswith(EVENT_FILES):
        return "tensorboard"
    return "file" if path.suffix in (".jsonl", ".json") else "console"
