"""What torch-npu's traces do differently from Kineto's, as Ascend documents it. Torch-free; unverified on the hardware.

`trace_view.json` is a bare list of events; times are texts of Unix microseconds; a process's name says what its events
are: `Ascend Hardware` (tasks on the device), `Communication` or `HCCL` (collectives and their parts), `Python` and
`CANN` (host), `Overlap Analysis` (sums of the others). A parser that was killed leaves the list open.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Lane = Literal["hardware", "communication"]

_LANES: tuple[tuple[Lane, re.Pattern[str]], ...] = (
    ("hardware", re.compile(r"^ascend hardware", re.IGNORECASE)),
    ("communication", re.compile(r"^(?:communication|hccl)\b", re.IGNORECASE)),
)
_OURS = re.compile(r"^(?:ascend hardware|communication|hccl|cann|overlap analysis)", re.IGNORECASE)
_WAITS = re.compile(
    r"event_?wait|event_?record|notify_?wait|notify_?record|place_?holder|write_?value", re.IGNORECASE
)
_COPIES = re.compile(r"^(?:memcpy|sdma|pcie_?dma)", re.IGNORECASE)
_INFO = re.compile(r"^profiler_info_(\d+)\.json$")
_RANK = re.compile(r"rank[_-]?(\d+)", re.IGNORECASE)
_FOLDER_SUFFIX = "_ascend_pt"
_UNIX_MICROSECONDS = 1e14
"""Larger times count from 1970; no clock that starts with a machine is as old."""

OUTPUT_FOLDER = "ASCEND_PROFILER_OUTPUT"
TRACE_FILE = "trace_view.json"


@dataclass(slots=True)
class AscendLanes:
    """Processes of a trace whose events are device work; empty for a trace of another device."""

    lane_of: dict[Any, Lane] = field(default_factory=dict)
    is_ascend: bool = False

    def device_work(self, event: Mapping[str, Any]) -> Lane | None:
        """What lane an event of device work is in; None for host events and tasks that only wait."""
        lane = self.lane_of.get(event.get("pid"))
        if lane == "hardware" and _is_wait(event):
            return None
        return lane


def find_lanes(events: Iterable[Mapping[str, Any]]) -> AscendLanes:
    """Lanes by the names of processes."""
    found = AscendLanes()
    for event in events:
        if event.get("name") != "process_name":
            continue
        args = event.get("args")
        if not isinstance(args, dict):
            continue
        name = str(args.get("name", ""))
        found.is_ascend = found.is_ascend or bool(_OURS.match(name))
        for lane, pattern in _LANES:
            if pattern.match(name):
                found.lane_of[event.get("pid")] = lane
    return found


def _is_wait(event: Mapping[str, Any]) -> bool:
    args = event.get("args")
    task_type = str(args.get("Task Type", "")) if isinstance(args, dict) else ""
    return bool(_WAITS.search(str(event.get("name", ""))) or _WAITS.search(task_type))


def is_copy(name: str) -> bool:
    """Whether a task of the hardware lane moves memory; inside a collective it is a part of it."""
    return bool(_COPIES.match(name))


def time_base_us(events: Iterable[Mapping[str, Any]]) -> int:
    """Whole microseconds to take off every time, so that a float still tells nanoseconds; 0 where times are small."""
    first: float | None = None
    for event in events:
        if "ts" in event:
            time = float(event["ts"])
            first = time if first is None or time < first else first
    return 0 if first is None or first < _UNIX_MICROSECONDS else int(first)


def microseconds(time: Any, base_us: int) -> float:
    """A time less the base; digits of a text are not lost on the way."""
    if base_us and isinstance(time, str):
        whole, _, fraction = time.partition(".")
        return int(whole) - base_us + float(f"0.{fraction or 0}")
    return float(time) - base_us


def closed_list(text: str) -> str:
    """The text of a list that a killed parser left open, cut after its last whole event and closed."""
    body = text.rstrip()
    if not body.startswith("[") or body.endswith("]"):
        return text
    return body[: body.rfind("}") + 1] + "]"


def rank_of_folder(path: Path) -> int | None:
    """The rank that a file below a `*_ascend_pt` folder belongs to: by profiler_info_{rank}.json, else the folder's
    name."""
    folder = next((parent for parent in path.parents if parent.name.endswith(_FOLDER_SUFFIX)), None)
    if folder is None:
        return None
    for entry in sorted(folder.iterdir()):
        if match := _INFO.match(entry.name):
            return int(match.group(1))
    match = _RANK.search(folder.name)
    return int(match.group(1)) if match else None


def only_traces(files: Iterable[Path]) -> list[Path]:
    """Of files below `*_ascend_pt` folders, the timelines; the other JSON there are sums and settings."""
    return [
        path
        for path in files
        if path.name == TRACE_FILE or not any(parent.name.endswith(_FOLDER_SUFFIX) for parent in path.parents)
    ]


def without_text(folder: Path) -> Path | None:
    """A database that holds a profile no trace was exported of, if there is one."""
    return next(iter(sorted(folder.rglob("ascend_pytorch_profiler*.db"))), None)
