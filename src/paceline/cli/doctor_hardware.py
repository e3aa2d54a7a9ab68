"""Checks of what a run would share and be bounded by: devices in use, host load, interconnect, measured ceilings."""

import os
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from paceline.bench.ceilings import device_name, measure_ceilings
from paceline.cli.checks import OK, WARN, Check, usable_cores
from paceline.config import Config
from paceline.telemetry.ceilings import Ceilings, read_ceilings, store_ceilings
from paceline.telemetry.device.nvml import NoSourceError, NvmlSource
from paceline.telemetry.device.records import DeviceFigures

_LOAD_S = 0.3
_BUSY_SHARE = 0.25
_SLOW_LATENCY_US = {"nccl": 100.0, "gloo": 2000.0}
_MEASURE = "paceline doctor --measure finds it once"

_SLOW_FLAGS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "CUDA_LAUNCH_BLOCKING": ("every kernel is waited for", lambda value: value not in ("", "0")),
    "TORCH_DISTRIBUTED_DEBUG": ("collectives are checked twice", lambda value: value.upper() == "DETAIL"),
    "NCCL_P2P_DISABLE": ("devices talk through the host", lambda value: value not in ("", "0")),
    "NCCL_DEBUG": ("NCCL logs every call", lambda value: value.upper() == "TRACE"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("every tensor is allocated anew", lambda value: value != ""),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": ("compiled code is never reused", lambda value: value == "1"),
    "PYTHONASYNCIODEBUG": ("event loops are traced", lambda value: value != ""),
}
"""Variables that debugging leaves behind: what they cost, and which values do."""


def device_use() -> list[Check]:
    """How busy the devices are now, before a run; on a CPU, the cores."""
    if not torch.cuda.is_available():
        return [host_load()]
    checks = [host_load()]
    for index in range(torch.cuda.device_count()):
        name = f"cuda:{index} in use"
        try:
            source = NvmlSource(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
            figures = source()
            source.close()
        except (NoSourceError, RuntimeError) as error:
            advice = "its utilisation, power and clocks cannot be sampled"
            checks.append(Check(name, WARN, str(error), advice))
        else:
            checks.append(device_line(name, figures))
    return checks


def device_line(name: str, figures: DeviceFigures) -> Check:
    parts = []
    if figures.utilization is not None:
        parts.append(f"a kernel runs {figures.utilization:.0%} of the time")
    if figures.power_w is not None:
        parts.append(f"{figures.power_w:.0f} W")
    if figures.sm_clock_mhz is not None:
        parts.append(f"{figures.sm_clock_mhz:.0f} MHz")
    if figures.temperature_c is not None:
        parts.append(f"{figures.temperature_c:.0f} °C")
    found = ", ".join(parts) or "the driver gives no figures"
    if (figures.utilization or 0.0) > _BUSY_SHARE:
        return Check(name, WARN, found, "another process computes on it: steps will be slower and uneven")
    return Check(name, OK, found)


def host_load() -> Check:
    """Cores that other programs use now."""
    busy = psutil.cpu_percent(interval=_LOAD_S) / 100 * (os.cpu_count() or 1)
    cores = usable_cores()
    found = f"{busy:.1f} of {os.cpu_count()} cores are in use"
    if busy > _BUSY_SHARE * cores + 1:
        advice = "other programs take cores: rollouts, rewards and launches of kernels will wait for them"
        return Check("host load", WARN, found, advice)
    return Check("host load", OK, found)


def debug_flags() -> list[Check]:
    """Environment variables that slow a run down."""
    found = [
        Check(name, WARN, f"is {os.environ[name]}: {cost}", f"unset {name}")
        for name, (cost, is_slow) in _SLOW_FLAGS.items()
        if name in os.environ and is_slow(os.environ[name])
    ]
    return found or [Check("debug flags", OK, "no environment variable that slows runs down is set")]


def ceilings_check(ceilings: Ceilings | None) -> Check:
    """What products, copies and the disk reach, where it was measured."""
    if ceilings is None:
        return Check("ceilings", WARN, "not measured for this device and version of torch", _MEASURE)
    products = ", ".join(f"{dtype} {value:,.3g}" for dtype, value in ceilings.matmul_tflops.items())
    found = f"TFLOP/s: {products}"
    if ceilings.copy_gbs is not None:
        found += f"; copy {ceilings.copy_gbs:,.4g} GB/s"
    if ceilings.host_to_device_gbs is not None and ceilings.device_to_host_gbs is not None:
        found += (
            f"; to device {ceilings.host_to_device_gbs:.3g}, from it {ceilings.device_to_host_gbs:.3g} GB/s"
        )
    if ceilings.disk_write_gbs is not None:
        found += f"; disk {ceilings.disk_write_gbs:.2g} GB/s"
    return Check("ceilings", OK, found)


def interconnect(ceilings: Ceilings | None, num_devices: int) -> list[Check]:
    """Latency and bandwidth between two ranks, and whether devices reach each other without the host."""
    checks = [_collective_line(ceilings, num_devices)]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    apart = [
        f"{one}-{other}"
        for one in range(count)
        for other in range(one)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    if apart:
        found = f"devices {', '.join(apart)} reach each other through the host only"
        checks.append(Check("peer access", WARN, found, "sharding over them is slow: replicate instead"))
    elif count > 1:
        checks.append(Check("peer access", OK, f"all {count} devices reach each other directly"))
    return checks


def _collective_line(ceilings: Ceilings | None, num_devices: int) -> Check:
    if ceilings is None or ceilings.collective_latency_us is None or ceilings.collective_gbs is None:
        status = WARN if num_devices > 1 else OK
        return Check("interconnect", status, "latency not measured", _MEASURE if num_devices > 1 else "")
    backend = ceilings.collective_backend or ""
    found = (
        f"{backend}, two ranks: {ceilings.collective_latency_us:,.0f} µs latency, "
        f"{ceilings.collective_gbs:,.3g} GB/s all-reduce"
    )
    if ceilings.collective_latency_us > _SLOW_LATENCY_US.get(backend, float("inf")):
        advice = "small collectives will cost more than they carry: fewer, larger micro-batches"
        return Check("interconnect", WARN, found, advice)
    return Check("interconnect", OK, found)


def known_ceilings(config: Config | None, folder: Path, measure: bool) -> Ceilings | None:
    """Those that are kept for this machine's device, measured first where that is asked for (tens of seconds)."""
    if config is not None and config.cluster.num_threads:
        torch.set_num_threads(config.cluster.num_threads)  # what a CPU reaches depends on them
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not measure:
        return read_ceilings(device_name(device), torch.__version__)
    existing = folder.absolute()
    while not existing.is_dir():
        existing = existing.parent
    found = measure_ceilings(device, existing)
    store_ceilings(found)
    return found


def recipe_telemetry(config: Config) -> list[Check]:
    """How often a run measures itself."""
    telemetry = config.telemetry
    checks = []
    if 0 < telemetry.profile_every < 10:
        found = f"every {telemetry.profile_every} steps, each slower than the others"
        checks.append(
            Check("telemetry.profile_every", WARN, found, "telemetry.profile_every=50 shows as much")
        )
    if telemetry.keep_traces and not telemetry.profile_every:
        advice = "telemetry.profile_every=50 profiles some steps"
        checks.append(Check("telemetry.keep_traces", WARN, "no step is profiled, so none is kept", advice))
    if 0 < telemetry.sample_every_s < 0.5:
        advice = "telemetry.sample_every_s=5 shows as much in longer runs"
        checks.append(Check("telemetry.sample_every_s", WARN, f"{telemetry.sample_every_s} s", advice))
    return checks or [Check("telemetry", OK, _telemetry_text(config))]


def _telemetry_text(config: Config) -> str:
    telemetry = config.telemetry
    profile = f"every {telemetry.profile_every} steps" if telemetry.profile_every else "never"
    sample = f"every {telemetry.sample_every_s:g} s" if telemetry.sample_every_s else "never"
    return (
        f"steps profiled {profile}, devices sampled {sample}, sinks: {', '.join(telemetry.sinks) or 'none'}"
    )


def recipe_cache(config: Config) -> list[Check]:
    """Caches that take memory from training, or that nothing uses."""
    rollout, train = config.rollout, config.train
    if not rollout.keep_cache:
        return [Check("rollout.keep_cache", OK, "the KV cache gives its memory back to training")]
    if train.gradient_checkpointing != "none":
        advice = "rollout.keep_cache=false, and then less recomputing may do"
        found = "the KV cache keeps its memory while training recomputes activations to save some"
        return [Check("rollout.keep_cache", WARN, found, advice)]
    return [
        Check("rollout.keep_cache", OK, "the KV cache stays: no allocation per step, less memory to train")
    ]
