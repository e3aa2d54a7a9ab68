"""Device time of one call by class of kernel, from the framework's profiler."""

import re
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

CLASSES: tuple[tuple[str, str], ...] = (
    ("attention", r"flash|fmha|attention|varlen"),
    ("head_elementwise", r"logit_"),
    ("norm", r"rms_norm"),
    ("rotary", r"rotate"),
    ("gate", r"gate_(backward_)?kernel"),
    ("optimizer", r"adamw|FusedAdam"),
    ("matmul", r"nvjet|gemm|cutlass|cublas|sm90_xmma"),
    ("communication", r"nccl"),
    ("copy_and_fill", r"Memcpy|Memset|copy_kernel|FillFunctor|CatArray"),
)
"""Class and pattern of kernel names; the first that matches wins. What none matches is listed by name."""


def class_of(kernel: str) -> str | None:
    """The class of a kernel, None where no pattern knows it."""
    return next((name for name, pattern in CLASSES if re.search(pattern, kernel)), None)


def time_by_class(work: Callable[[], object]) -> dict[str, float | dict[str, float]]:
    """Milliseconds on the device by class, `busy` their sum, `wall` of the call, `others` by kernel name (largest)."""
    work()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
    by_class: dict[str, float] = {}
    others: dict[str, float] = {}
    for event in trace.key_averages():
        milliseconds = event.device_time_total / 1e3
        name = class_of(event.key)
        if name is None:
            others[event.key[:80]] = others.get(event.key[:80], 0.0) + milliseconds
        else:
            by_class[name] = by_class.get(name, 0.0) + milliseconds
    largest = dict(sorted(others.items(), key=lambda item: -item[1])[:8])
    busy = sum(by_class.values()) + sum(others.values())
    return {
        **dict(sorted(by_class.items(), key=lambda item: -item[1])),
        "others_total": sum(others.values()),
        "busy": busy,
        "wall": start.elapsed_time(end),
        "others": largest,
    }
