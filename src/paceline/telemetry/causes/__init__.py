"""From a profiler's trace to causes: time divided by what the device and the host did. Torch-free."""

from paceline.telemetry.causes.cells import Activity, Cells, Timeline, disjoint, split
from paceline.telemetry.causes.kernels import classify_kernel, classify_operator, classify_wait

__all__ = [
    "Activity",
    "Cells",
    "Timeline",
    "classify_kernel",
    "classify_operator",
    "classify_wait",
    "disjoint",
    "split",
]
