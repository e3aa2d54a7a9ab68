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
    "memory.timeline": ("Memory over step {step}, rank {rank}", "第 {step} 步的内存，进程 {rank}"),
    "memory.timeline-caption": (
        "Bands say which stage ran. The line is the peak of the stage that runs, not a sample of every moment.",
        "色带表示正在运行的阶段。曲线是该阶段的峰值，而非每一时刻的采样。",
    ),
    "memory.timeline-sampled": (
        "Bands say which stage ran. Samples show the moment, the stepped line the peak of the stage that runs.",
        "色带表示正在运行的阶段。采样线表示当时的值，阶梯线表示该阶段的峰值。",
    ),
    "memory.device-used": ("device, used", "显存，已用"),
    "memory.host-used": ("host, resident", "主机内存，常驻"),
    "memory.stage-peak": ("device, peak of the stage", "显存，该阶段峰值"),
    "memory.stage-host": ("host, after the stage", "主机内存，该阶段结束时"),
}
