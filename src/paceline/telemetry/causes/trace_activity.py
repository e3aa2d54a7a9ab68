"""What a trace says of devices and host: activity by cause, and every kernel with its time. Torch-free."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from paceline.telemetry.causes.cells import Activity, Intervals, no_intervals
from paceline.telemetry.causes.kernels import classify_wait
from paceline.telemetry.causes.records import KernelTotal
from paceline.telemetry.causes.torch_trace import Event, TorchTrace
from paceline.types import Cause

Classify = Callable[[str], tuple[Cause | None, str]]
"""`classify_kernel` or `classify_operator`."""


def activity_of(trace: TorchTrace, busy: Sequence[Event], classify: Classify) -> Activity:
    """When what ran: `busy` (the trace's kernels or operators) by class, and the host's waits by name."""
    by_cause: dict[str, list[tuple[float, float]]] = {}
    for event in busy:
        kind, _ = classify(event.name)
        by_cause.setdefault(kind or "compute", []).append((event.start, event.end))
    collectives = [(event.start, event.end) for event in trace.collectives]
    by_cause.setdefault("communication", []).extend(collectives)
    waits: dict[str, list[tuple[float, float]]] = {}
    for event in (*trace.annotations, *trace.frames):
        if wait := classify_wait(event.name):
            waits.setdefault(wait, []).append((event.start, event.end))
    return Activity(
        compute=_array(by_cause.get("compute")),
        memory=_array(by_cause.get("memory")),
        communication=_array(by_cause.get("communication")),
        data=_array(waits.get("data")),
        queue=_array(waits.get("queue")),
    )


def _array(pairs: list[tuple[float, float]] | None) -> Intervals:
    return np.array(pairs, dtype=float) if pairs else no_intervals()


def kernel_totals(
    busy: Iterable[Event], classify: Classify, start: float, end: float
) -> tuple[KernelTotal, ...]:
    """Calls and seconds by name of what begins in [start, end), the longest first."""
    counts: dict[str, list[float]] = {}
    for event in busy:
        if start <= event.start < end:
            entry = counts.setdefault(event.name, [0, 0.0])
            entry[0] += event.calls
            entry[1] += event.end - event.start
    totals = []
    for name, (count, seconds) in counts.items():
        kind, library = classify(name)
        totals.append(KernelTotal(name, kind or "compute", library, kind is not None, int(count), seconds))
    return tuple(sorted(totals, key=lambda total: -total.total_s))


def collective_totals(collectives: Iterable[Event], start: float, end: float) -> tuple[KernelTotal, ...]:
    """The same for device work that its process says is communication."""
    return kernel_totals(collectives, lambda name: ("communication", "HCCL"), start, end)
