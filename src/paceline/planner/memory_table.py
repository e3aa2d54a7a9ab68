"""A memory estimate for people: what `--dry-run` prints."""

from paceline.planner.memory import GIB, MemoryEstimate, Phase

_PHASES: dict[Phase, str] = {
    "always": "always there",
    "activations": "forward and backward",
    "head": "at the head",
    "layers": "in the last layer's backward pass",
    "end of backward": "at the end of the backward pass",
    "optimizer": "in the optimiser's step",
    "scoring": "forward-only passes",
    "rollout": "sampling",
}


def memory_table(estimate: MemoryEstimate, device_bytes: float | None = None) -> str:
    """Every part with its phase, the peak of each phase, and the peak of all, in GiB per device."""
    several = len({part.role for part in estimate.parts}) > 1
    rows = [
        (f"{part.role}: {part.name}" if several else part.name, part.num_bytes, _PHASES[part.phase])
        for part in estimate.parts
        if part.num_bytes > 0
    ]
    role, phase = estimate.peak_phase
    where = f"peak: {role}, {_PHASES[phase]}" if several else f"peak: {_PHASES[phase]}"
    rows.append(("in all", estimate.total, where))
    width = max(len(name) for name, _, _ in rows)
    lines = ["memory per device, estimated, GiB"]
    lines += [f"  {name:<{width}}  {size / GIB:8.2f}  {when}" for name, size, when in rows]
    if device_bytes is not None:
        lines.append(f"  {'the device has':<{width}}  {device_bytes / GIB:8.2f}")
    lines += [f"  note: {note}" for note in estimate.notes]
    return "\n".join(lines)
