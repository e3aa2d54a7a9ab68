"""A profiled step of a live run: the ledger says when each stage owned the time, the trace what ran then. Torch-free.

Windows are the ledger's, so the cells of a stage add up to its self-time and the stages to the step. While nothing
runs, a span that says what it waits for decides: data, queue, or communication (the host is in an exchange).
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline.telemetry.causes.cells import Activity, Cells, Intervals, Timeline, no_intervals
from paceline.telemetry.causes.kernels import classify_kernel, classify_operator
from paceline.telemetry.causes.records import Basis, StepCauses
from paceline.telemetry.causes.torch_trace import Event, TorchTrace
from paceline.telemetry.causes.trace_activity import activity_of, kernel_totals
from paceline.telemetry.causes.windows import SelfTime, by_stage, of_cause
from paceline.types import CAUSES


def split_live_step(
    trace: TorchTrace,
    stretches: Sequence[SelfTime],
    step: int,
    basis: Basis,
    origin_s: float,
    profiler_s: float = 0.0,
) -> StepCauses:
    """Cells and kernels of the step that `stretches` (of `self_times`) partition.

    `origin_s` is the trace's time at the step's begin. With basis `device` a trace without kernels is a device that
    did nothing.
    """
    start_ns, end_ns = stretches[0].start_ns, stretches[-1].end_ns
    length_s = (end_ns - start_ns) / 1e9
    classify = classify_kernel if basis == "device" else classify_operator
    busy = trace.kernels if basis == "device" else trace.operators
    busy = [_moved(one, origin_s) for one in busy if one.end > origin_s and one.start < origin_s + length_s]
    # the trace's own ranges are not asked: the ledger's spans say what is waited for
    collectives = [_moved(one, origin_s) for one in trace.collectives]
    bare = replace(trace, annotations=[], frames=[], collectives=collectives)
    activity = with_waits(activity_of(bare, busy, classify), stretches, start_ns)
    meetings = [one for one in stretches if basis == "operators" and is_meeting(one)]
    others = [one for one in stretches if basis != "operators" or not is_meeting(one)]
    cells = _cells(Timeline(activity), others, start_ns)
    for stage, met in _cells(
        Timeline(replace(activity, communication=no_intervals())), meetings, start_ns
    ).items():
        own = cells.setdefault(stage, dict.fromkeys(CAUSES, 0.0))
        for cause, seconds in met.items():
            own[cause] += seconds
    kernels = kernel_totals(busy, classify, 0.0, length_s)
    return StepCauses(step, cells, kernels, basis, profiler_s)


def is_meeting(stretch: SelfTime) -> bool:
    """Whether ranks wait for one another here. On a CPU the operator they wait in is a collective, which is the means
    of waiting and exchanges nothing."""
    return stretch.stage == "idle" and stretch.cause == "queue"


def _cells(timeline: Timeline, stretches: Sequence[SelfTime], origin_ns: int) -> dict[str, Cells]:
    return {stage: timeline.split(windows) for stage, windows in by_stage(stretches, origin_ns).items()}


def with_waits(activity: Activity, stretches: Sequence[SelfTime], origin_ns: int) -> Activity:
    """The activity with what the spans say they wait for, which counts where nothing of a higher class runs."""

    def both(found: Intervals, said: Intervals) -> Intervals:
        return np.concatenate((found, said)) if len(said) else found

    return Activity(
        compute=activity.compute,
        memory=both(activity.memory, of_cause(stretches, "memory", origin_ns)),
        communication=both(activity.communication, of_cause(stretches, "communication", origin_ns)),
        data=both(activity.data, of_cause(stretches, "data", origin_ns)),
        queue=both(activity.queue, of_cause(stretches, "queue", origin_ns)),
    )


def _moved(event: Event, origin_s: float) -> Event:
    return Event(event.name, event.start - origin_s, event.end - origin_s, event.calls)


def runs_after(trace: TorchTrace, time_s: float) -> bool:
    """Whether a kernel begins after `time_s`: the profiler's buffers were not full before."""
    return any(kernel.start >= time_s for kernel in trace.kernels)
