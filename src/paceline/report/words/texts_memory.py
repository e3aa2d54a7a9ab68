"""Memory."""

TEXTS: dict[str, tuple[str, str]] = {
    "memory.allocated": ("device, held by tensors", "显存，张量占用"),
    "memory.reserved": ("device, held by the allocator", "显存，分配器占用"),
    "memory.host": ("host, resident", "主机内存，常驻"),
    "memory.by-stage": ("Peak memory by stage", "各阶段的内存峰值"),
    "memory.by-stage-caption": (
        "Largest value at the end of any span of the stage.",
        "该阶段任一计时区间结束时的最大值。",
    ),
    "memory.cpu": (
        "No device memory was sampled: training ran on the CPU.",
        "没有显存采样：训练在 CPU 上进行。",
    ),
    "memory.over-steps": ("Memory over steps", "内存随步的变化"),
    "memory.over-steps-caption": (
        "Largest value of any stage. A line that keeps rising may be a leak.",
        "任一阶段的最大值。持续上升的曲线可能意味着泄漏。",
    ),
}
