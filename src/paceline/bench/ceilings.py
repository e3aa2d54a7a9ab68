"""Measures what a machine reaches at best: matrix products, copies, a collective of two ranks, the disk."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from paceline.telemetry.ceilings import Ceilings, cpu_device_name
from paceline.telemetry.environment import cpu_model

_MIB = 2**20
_NUM_RANKS = 2
_NUM_SMALL = 50


def device_name(device: torch.device) -> str:
    """The name ceilings of a device are kept under."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_device_name(cpu_model(), torch.get_num_threads())


def measure_ceilings(device: torch.device, folder: Path, seconds: float = 1.0) -> Ceilings:
    """Everything there is to measure on the device; `seconds` is spent on each figure. `folder` is where it writes."""
    on_gpu = device.type == "cuda"
    dtypes = (torch.bfloat16, torch.float16, torch.float32) if on_gpu else (torch.float32, torch.bfloat16)
    size = 8192 if on_gpu else 1024
    products = {str(dtype).removeprefix("torch."): _matmul(device, dtype, size, seconds) for dtype in dtypes}
    host, pinned = (torch.empty(256 * _MIB, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2))
    there = torch.empty(256 * _MIB, dtype=torch.uint8, device=device) if on_gpu else None
    backend, latency_us, collective_gbs = _collective(on_gpu, seconds)
    return Ceilings(
        device_name=device_name(device),
        torch_version=torch.__version__,
        matmul_tflops=products,
        copy_gbs=_copy(device, (1024 if on_gpu else 128) * _MIB, seconds),
        host_to_device_gbs=None if there is None else _transfer(host, there, seconds),
        device_to_host_gbs=None if there is None else _transfer(there, pinned, seconds),
        collective_backend=backend,
        collective_latency_us=latency_us,
        collective_gbs=collective_gbs,
        disk_write_gbs=write_speed(folder, (256 if on_gpu else 64) * _MIB) / 1e9,
        unix_s=time.time(),
    )


def _fastest(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Seconds of the quickest call: a ceiling is what is reached when nothing disturbs."""
    work()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or best == float("inf"):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        best = min(best, time.perf_counter() - began)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _matmul(device: torch.device, dtype: torch.dtype, size: int, seconds: float) -> float:
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / _fastest(lambda: torch.mm(left, right, out=out), device, seconds) / 1e12


def _copy(device: torch.device, num_bytes: int, seconds: float) -> float:
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _fastest(lambda: target.copy_(source), device, seconds) / 1e9


def _transfer(source: Tensor, target: Tensor, seconds: float) -> float:
    device = source.device if source.is_cuda else target.device
    took_s = _fastest(lambda: target.copy_(source, non_blocking=True), device, seconds)
    return source.numel() / took_s / 1e9


def write_speed(folder: Path, num_bytes: int) -> float:
    """Bytes per second of one synced write; the file is gone afterwards."""
    block = os.urandom(_MIB)
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(num_bytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return num_bytes / (time.perf_counter() - began)


def _collective(on_gpu: bool, seconds: float) -> tuple[str | None, float | None, float | None]:
    """Backend, latency in microseconds and bus bandwidth in GB/s of two ranks; None without a second device."""
    if on_gpu and torch.cuda.device_count() < _NUM_RANKS:
        return None, None, None
    backend = "nccl" if on_gpu else "gloo"
    with tempfile.TemporaryDirectory(prefix="paceline-collective-") as folder:
        start_processes(
            _collective_rank, args=(backend, folder, seconds), nprocs=_NUM_RANKS, start_method="spawn"
        )
        latency_us, gbs = map(float, (Path(folder) / "result").read_text(encoding="ascii").split())
    return backend, latency_us, gbs


def _collective_rank(rank: int, backend: str, folder: str, seconds: float) -> None:
    """One of two ranks, in a process of its own."""
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=_NUM_RANKS)
    try:
        small = torch.zeros(1, device=device)
        large = torch.zeros((256 if device.type == "cuda" else 16) * _MIB // 4, device=device)
        latency_us = statistics.median(_all_reduce_s(small, _NUM_SMALL)) * 1e6
        took_s = torch.tensor(min(_all_reduce_s(large, 2)), device=device)
        dist.all_reduce(took_s, dist.ReduceOp.MAX)  # both ranks must repeat it equally often
        num_large = max(3, min(50, int(seconds / max(float(took_s), 1e-6))))
        bus_bytes = 2 * (_NUM_RANKS - 1) / _NUM_RANKS * large.numel() * large.element_size()
        gbs = bus_bytes / min(_all_reduce_s(large, num_large)) / 1e9
        if rank == 0:
            (Path(folder) / "result").write_text(f"{latency_us} {gbs}", encoding="ascii")
    finally:
        dist.destroy_process_group()


def _all_reduce_s(tensor: Tensor, count: int) -> list[float]:
    """Seconds of each of `count` all-reduces, the same number on both ranks."""
    found = []
    dist.all_reduce(tensor)
    for _ in range(count):
        dist.barrier()
        _wait(tensor.device)
        began = time.perf_counter()
        dist.all_reduce(tensor)
        _wait(tensor.device)
        found.append(time.perf_counter() - began)
    return found
