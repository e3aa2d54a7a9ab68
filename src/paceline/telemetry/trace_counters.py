"""What stands beside the spans in a trace: causes of profiled steps, and samples of device and host. Torch-free."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.telemetry.causes.records import RankCauses
from paceline.telemetry.device.records import DeviceFigures, DeviceSample, HostFigures, RankDevice
from paceline.telemetry.records import RankLedger
from paceline.types import CAUSES

CAUSES_COUNTER = "causes, seconds of the step"


def causes_by_step(ranks: Sequence[RankCauses]) -> dict[tuple[int, int], Mapping[str, Mapping[str, float]]]:
    """(rank, step) to cells by stage, for the arguments of the step's slice; cells of nothing are left out."""
    return {
        (rank.rank, step.step): {
            stage: {cause: seconds for cause, seconds in cells.items() if seconds > 0}
            for stage, cells in step.cells.items()
        }
        for rank in ranks
        for step in rank.steps
    }


def cause_counters(ledger: RankLedger, causes: RankCauses, origin_s: float) -> Iterator[dict[str, Any]]:
    """Six counters that stand at a profiled step's seconds by cause from its begin to its end."""
    profiled = {step.step: step for step in causes.steps}
    for process in ledger.processes:
        offset_s = process.unix_s - origin_s
        for section in process.sections:
            step = None if section.step is None else profiled.get(section.step)
            if step is None:
                continue
            sums: dict[str, float | None] = {
                cause: sum(cells[cause] for cells in step.cells.values()) for cause in CAUSES
            }
            yield _counter(CAUSES_COUNTER, ledger.rank, section.start_s + offset_s, sums)
            yield _counter(CAUSES_COUNTER, ledger.rank, section.end_s + offset_s, dict.fromkeys(sums, 0.0))


def device_counters(device: RankDevice, origin_s: float) -> Iterator[dict[str, Any]]:
    """Counters of every sample: shares in percent, power, clocks, memory in GiB, CPU in cores."""
    for sample in device.samples:
        for name, values in _counters(sample):
            known = {key: value for key, value in values.items() if value is not None}
            if known:
                yield _counter(name, device.rank, max(0.0, sample.unix_s - origin_s), known)


def _counters(sample: DeviceSample) -> Iterator[tuple[str, dict[str, float | None]]]:
    if sample.device is not None:
        yield from _of_device(sample.device)
    if sample.host is not None:
        yield from _of_host(sample.host)


def _of_device(figures: DeviceFigures) -> Iterator[tuple[str, dict[str, float | None]]]:
    shares = {
        "kernel running": figures.utilization,
        "SM": figures.sm_activity,
        "tensor": figures.tensor_activity,
        "DRAM": figures.dram_activity,
    }
    yield "device activity, %", {key: None if one is None else one * 100 for key, one in shares.items()}
    yield "device power, W", {"power": figures.power_w}
    yield "device clocks, MHz", {"SM": figures.sm_clock_mhz, "memory": figures.memory_clock_mhz}
    yield "device memory, GiB", {"used": _gib(figures.memory_used)}


def _of_host(figures: HostFigures) -> Iterator[tuple[str, dict[str, float | None]]]:
    yield (
        "host CPU, cores",
        {"rank": figures.process_cpu, "children": figures.children_cpu, "machine": figures.host_cpu},
    )
    yield (
        "host memory, GiB",
        {"rank": _gib(figures.process_rss), "children": _gib(figures.children_rss)},
    )


def _gib(num_bytes: int | None) -> float | None:
    return None if num_bytes is None else num_bytes / 2**30


def _counter(name: str, rank: int, time_s: float, values: Mapping[str, float | None]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": rank, "tid": 0, "ts": time_s * 1e6, "args": dict(values)}
