"""Reads a torch-profiler trace (JSON, plain or gzip) of any framework. Torch-free.

The format is Chrome's trace events as Kineto writes them: times in microseconds, device work in the categories
`kernel`, `gpu_memcpy` and `gpu_memset`, host operators in `cpu_op`, named ranges in `user_annotation`. What torch-npu's
traces do differently is in `ascend_trace`.
"""

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.telemetry.causes.ascend_trace import (
    closed_list,
    find_lanes,
    is_copy,
    microseconds,
    rank_of_folder,
    time_base_us,
)
from paceline.telemetry.causes.cells import covered, disjoint

_DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "concurrent_kernel"})
_NOT_READ = frozenset({"cuda_runtime", "cuda_driver", "overhead", "trace", "gpu_user_annotation"})
"""Calls that queue work, which are as many as kernels, and ranges drawn a second time."""
_STEP = re.compile(r"^ProfilerStep#(\d+)$")
_MICROSECOND = 1e-6


@dataclass(frozen=True, slots=True)
class Event:
    """A named stretch of time, in seconds of the trace's clock. `calls` is 0 where it goes on after an inner one."""

    name: str
    start: float
    end: float
    calls: int = 1


@dataclass(slots=True)
class TorchTrace:
    """One file. `kernels` are device work, `operators` the times in which a host operator is the innermost of its
    thread; `annotations` and `frames` (Python functions) are those of the main thread. `base_ns` is the Unix time of
    its time 0 in nanoseconds, where the file says it."""

    path: Path
    rank: int | None
    world_size: int | None
    device_name: str | None
    base_ns: int | None
    kernels: list[Event] = field(default_factory=list)
    collectives: list[Event] = field(default_factory=list)
    """Device work that its process says is communication, whatever its name."""
    operators: list[Event] = field(default_factory=list)
    annotations: list[Event] = field(default_factory=list)
    frames: list[Event] = field(default_factory=list)
    steps: dict[int, Event] = field(default_factory=dict)

    @property
    def has_device(self) -> bool:
        """Whether a device did anything."""
        return bool(self.kernels or self.collectives)

    @property
    def offset_s(self) -> float | None:
        """What turns its times into Unix time."""
        return None if self.base_ns is None else self.base_ns / 1e9

    @property
    def span(self) -> Event | None:
        """From the first event to the last."""
        events = [*self.kernels, *self.collectives, *self.operators, *self.annotations, *self.steps.values()]
        if not events:
            return None
        return Event("trace", min(event.start for event in events), max(event.end for event in events))


def read_torch_trace(path: Path) -> TorchTrace:
    """Reads one file.

    Raises:
        ValueError: it is no JSON, or holds no trace events.
    """
    content = _load(path)
    if not isinstance(content, dict | list):
        raise ValueError(f"{path}: no traceEvents in it")
    head: Mapping[str, Any] = content if isinstance(content, dict) else {}
    raw = head.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(raw, list):
        raise ValueError(f"{path}: no traceEvents in it")
    events = [event for event in raw if isinstance(event, dict)]
    distributed = head.get("distributedInfo") or {}
    properties = head.get("deviceProperties") or []
    base, base_us = head.get("baseTimeNanoseconds"), time_base_us(events)
    if base is None and base_us:
        base = base_us * 1000
    trace = TorchTrace(
        path,
        rank=distributed.get("rank", rank_of_folder(path)),
        world_size=distributed.get("world_size"),
        device_name=properties[0].get("name") if properties else None,
        base_ns=None if base is None else int(base),
    )
    _sort_in(trace, events, base_us)
    return trace


def _load(path: Path) -> Any:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
                return json.load(file)
        text = path.read_text(encoding="utf-8", errors="replace")
        return json.loads(closed_list(text))
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path}: not a readable trace ({error})") from error


def _sort_in(trace: TorchTrace, events: Sequence[Mapping[str, Any]], base_us: int) -> None:
    lanes = find_lanes(events)
    operators: dict[tuple[Any, Any], list[Event]] = {}
    ranges: dict[tuple[Any, Any], list[Event]] = {}
    frames: dict[tuple[Any, Any], list[Event]] = {}
    for event in events:
        if event.get("ph") != "X" or "ts" not in event:
            continue
        category = str(event.get("cat", "")).lower()
        if category in _NOT_READ:
            continue
        stretch = _stretch(event, base_us)
        thread = (event.get("pid"), event.get("tid"))
        if (lane := lanes.device_work(event)) is not None:
            (trace.collectives if lane == "communication" else trace.kernels).append(stretch)
        elif event.get("pid") in lanes.lane_of:
            continue  # a task that waits is no work
        elif category in _DEVICE_CATEGORIES:
            trace.kernels.append(stretch)
        elif category in ("cpu_op", "operator"):
            operators.setdefault(thread, []).append(stretch)
            if lanes.is_ascend and "::" not in stretch.name:  # torch-npu has no category for named ranges
                ranges.setdefault(thread, []).append(stretch)
        elif category == "user_annotation":
            ranges.setdefault(thread, []).append(stretch)
        elif category == "python_function":
            frames.setdefault(thread, []).append(stretch)
    trace.kernels, parts = _without_parts(trace.kernels, trace.collectives)
    trace.collectives += parts
    main = _main_thread(ranges, operators)
    trace.operators = [own for stretches in operators.values() for own in _own_times(stretches)]
    trace.frames = frames.get(main, [])
    for stretch in ranges.get(main, []):
        if match := _STEP.match(stretch.name):
            trace.steps[int(match.group(1))] = stretch
        else:
            trace.annotations.append(stretch)


def _without_parts(kernels: list[Event], collectives: list[Event]) -> tuple[list[Event], list[Event]]:
    """The kernels, and the copies among them that lie inside a collective, which they are a part of."""
    if not collectives:
        return kernels, []
    union = disjoint(np.array([(one.start, one.end) for one in collectives]))
    inside = [
        is_copy(one.name) and covered(union, np.array([[one.start, one.end]])) > 0.5 * (one.end - one.start)
        for one in kernels
    ]
    rest = [one for one, is_part in zip(kernels, inside, strict=True) if not is_part]
    return rest, [one for one, is_part in zip(kernels, inside, strict=True) if is_part]


def _stretch(event: Mapping[str, Any], base_us: int) -> Event:
    start = microseconds(event["ts"], base_us) * _MICROSECOND
    return Event(str(event.get("name", "")), start, start + float(event.get("dur") or 0.0) * _MICROSECOND)


def _main_thread(ranges: Mapping[Any, list[Event]], operators: Mapping[Any, list[Event]]) -> Any:
    """The thread that marks the steps; else the one with the most annotated time, else with the most operators."""
    for thread, stretches in ranges.items():
        if any(_STEP.match(stretch.name) for stretch in stretches):
            return thread
    for found in (ranges, operators):
        if found:
            return max(found, key=lambda thread: sum(one.end - one.start for one in found[thread]))
    return None


def _own_times(stretches: list[Event]) -> Iterator[Event]:
    """When each operator of one thread was the innermost one."""
    stack: list[Event] = []
    now = 0.0
    begun: set[int] = set()

    def own(until: float) -> Iterator[Event]:
        nonlocal now
        innermost = stack[-1]
        if until > now:
            yield Event(innermost.name, now, until, calls=int(id(innermost) not in begun))
            begun.add(id(innermost))
        now = max(now, until)

    for one in sorted(stretches, key=lambda stretch: (stretch.start, -stretch.end)):
        while stack and stack[-1].end <= one.start:
            yield from own(stack[-1].end)
            stack.pop()
        if stack:
            yield from own(one.start)
        now = one.start
        stack.append(one)
    while stack:
        yield from own(stack[-1].end)
        stack.pop()
