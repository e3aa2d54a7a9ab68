"""Reads a torch-profiler trace (JSON, plain or gzip) of any framework. Torch-free.

The format is Chrome's trace events as Kineto writes them: times in microseconds, device work in the categories
`kernel`, `gpu_memcpy` and `gpu_memset`, host operators in `cpu_op`, named ranges in `user_annotation`. torch-npu writes
a bare list of events and puts device work into processes of its own (unverified without the hardware).
"""

import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset", "concurrent_kernel"})
_ASCEND_PROCESSES = re.compile(r"ascend hardware|^communication$|hccl", re.IGNORECASE)
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
    operators: list[Event] = field(default_factory=list)
    annotations: list[Event] = field(default_factory=list)
    frames: list[Event] = field(default_factory=list)
    steps: dict[int, Event] = field(default_factory=dict)

    @property
    def offset_s(self) -> float | None:
        """What turns its times into Unix time."""
        return None if self.base_ns is None else self.base_ns / 1e9

    @property
    def span(self) -> Event | None:
        """From the first event to the last."""
        events = [*self.kernels, *self.operators, *self.annotations, *self.steps.values()]
        if not events:
            return None
        return Event("trace", min(event.start for event in events), max(event.end for event in events))


def read_torch_trace(path: Path) -> TorchTrace:
    """Reads one file.

    Raises:
        ValueError: it is no JSON, or holds no trace events.
    """
    content = _load(path)
    head: Mapping[str, Any] = content if isinstance(content, dict) else {}
    raw = head.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(raw, list):
        raise ValueError(f"{path}: no traceEvents in it")
    events = [event for event in raw if isinstance(event, dict)]
    distributed = head.get("distributedInfo") or {}
    properties = head.get("deviceProperties") or []
    base = head.get("baseTimeNanoseconds")
    trace = TorchTrace(
        path,
        rank=distributed.get("rank"),
        world_size=distributed.get("world_size"),
        device_name=properties[0].get("name") if properties else None,
        base_ns=None if base is None else int(base),
    )
    _sort_in(trace, events)
    return trace


def _load(path: Path) -> Any:
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
                return json.load(file)
        with path.open(encoding="utf-8", errors="replace") as file:
            return json.load(file)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path}: not a readable trace ({error})") from error


def _sort_in(trace: TorchTrace, events: Iterable[Mapping[str, Any]]) -> None:
    events = list(events)
    device_processes = {
        event.get("pid")
        for event in events
        if event.get("name") == "process_name" and _ASCEND_PROCESSES.search(str(_args(event).get("name", "")))
    }
    operators: dict[tuple[Any, Any], list[Event]] = {}
    ranges: dict[tuple[Any, Any], list[Event]] = {}
    frames: dict[tuple[Any, Any], list[Event]] = {}
    for event in events:
        if event.get("ph") != "X" or "ts" not in event:
            continue
        category = str(event.get("cat", "")).lower()
        stretch = _stretch(event)
        thread = (event.get("pid"), event.get("tid"))
        if category in _DEVICE_CATEGORIES or event.get("pid") in device_processes:
            trace.kernels.append(stretch)
        elif category in ("cpu_op", "operator"):
            operators.setdefault(thread, []).append(stretch)
        elif category == "user_annotation":
            ranges.setdefault(thread, []).append(stretch)
        elif category == "python_function":
            frames.setdefault(thread, []).append(stretch)
    main = _main_thread(ranges, operators)
    trace.operators = [own for stretches in operators.values() for own in _own_times(stretches)]
    trace.frames = frames.get(main, [])
    for stretch in ranges.get(main, []):
        if match := _STEP.match(stretch.name):
            trace.steps[int(match.group(1))] = stretch
        else:
            trace.annotations.append(stretch)


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _stretch(event: Mapping[str, Any]) -> Event:
    start = float(event["ts"]) * _MICROSECOND  # torch-npu writes numbers as text
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
