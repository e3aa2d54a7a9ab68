"""Compares our reading of torch-profiler traces with Meta's HolisticTraceAnalysis on the same files.

usage: python benchmarks/causes_against_hta.py RUN/profiles     kept traces of a run (telemetry.keep_traces)
       python benchmarks/causes_against_hta.py TRACE_FOLDER     traces of one job, one file per rank
       python benchmarks/causes_against_hta.py --synthetic 5    made up, five of them

HTA 0.5.0 (MIT) needs pandas 2, so it runs in an environment of its own: pip install HolisticTraceAnalysis 'pandas<3',
and PYTHONPATH=src. HTA knows three classes: communication, copies, and every other kernel as compute; ours are grouped
the same way for the comparison. Exit code 1 when a figure differs by more than 1 % of the traced time, 2 when there is
nothing to compare: HTA reads device work only, and a run on a CPU has none.
"""

import json
import random
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
from hta.trace_analysis import TraceAnalysis

from paceline.telemetry.causes import Activity, classify_kernel, split
from paceline.telemetry.causes.cells import no_intervals
from paceline.telemetry.causes.torch_trace import read_torch_trace

TOLERANCE = 0.01
GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn"
ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
COPY = "Memcpy DtoD (Device -> Device)"


def write_synthetic(folder: Path, seed: int) -> None:
    """Three streams of products, element-wise kernels and copies, and collectives, at random times."""
    rng = random.Random(seed)
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "pid": 1, "tid": 1}
    events: list[dict[str, object]] = [{**step, "ts": 0, "dur": 1_000_000, "args": {}}]
    for stream, names in ((7, [GEMM]), (8, [ADD, COPY]), (20, [NCCL])):
        now = rng.uniform(0, 20_000)
        while now < 960_000:
            name, length = rng.choice(names), rng.uniform(1_000, 25_000)
            args = {"stream": stream, "device": 0, "correlation": len(events), "External id": len(events)}
            category = "gpu_memcpy" if name == COPY else "kernel"
            kernel = {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 0,
                "tid": stream,
                "ts": now,
                "dur": length,
            }
            launch = {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunchKernel",
                "pid": 1,
                "tid": 1,
                "dur": 2,
            }
            events.append({**kernel, "args": args})
            events.append({**launch, "ts": max(0.0, now - 5), "args": {"correlation": args["correlation"]}})
            now += length + rng.uniform(0, 40_000)
    content = {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}
    (folder / "rank0.json").write_text(json.dumps(content))


def ours(path: Path) -> dict[str, float]:
    """Microseconds in HTA's three classes, from the first kernel to the last."""
    trace = read_torch_trace(path)
    groups: dict[str, list[tuple[float, float]]] = {"compute": [], "communication": [], "memory": []}
    for kernel in trace.kernels:
        cause, _ = classify_kernel(kernel.name)
        is_copy = kernel.name.lower().startswith(("memcpy", "memset"))
        group = "communication" if cause == "communication" else "memory" if is_copy else "compute"
        groups[group].append((kernel.start, kernel.end))
    arrays = {name: np.array(pairs) if pairs else no_intervals() for name, pairs in groups.items()}
    begin = min(kernel.start for kernel in trace.kernels)
    end = max(kernel.end for kernel in trace.kernels)
    cells = split(np.array([[begin, end]]), Activity(**arrays))
    return {
        "idle_time(us)": cells["scheduling"] * 1e6,
        "compute_time(us)": cells["compute"] * 1e6,
        "non_compute_time(us)": (cells["memory"] + cells["communication"]) * 1e6,
        "kernel_time(us)": (end - begin) * 1e6,
    }


def by_step(folder: Path) -> dict[int, dict[int, Path]]:
    """Files with device work by step (of a run's kept traces; else 0) and rank."""
    found: dict[int, dict[int, Path]] = {}
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")]):
        trace = read_torch_trace(path)
        name = re.match(r"step(\d+)\.rank(\d+)\.", path.name)
        step, rank = map(int, name.groups()) if name else (0, trace.rank or 0)
        if trace.kernels:
            found.setdefault(step, {})[rank] = path
        else:
            print(f"{path.name}: no device work in it, nothing to compare")
    return found


def compare(files: dict[int, Path]) -> float:
    """Prints both readings of one step's files by rank, and returns the largest difference as a share of its time."""
    largest = 0.0
    analysis = TraceAnalysis(trace_files={rank: str(path) for rank, path in files.items()}, trace_dir="")
    theirs = analysis.get_temporal_breakdown(visualize=False).set_index("rank")
    for rank, path in files.items():
        for name, value in ours(path).items():
            difference = abs(value - theirs.loc[rank, name]) / theirs.loc[rank, "kernel_time(us)"]
            largest = max(largest, difference)
            print(
                f"rank {rank} {name:<22} ours {value:>14.1f} HTA {theirs.loc[rank, name]:>14.1f} {difference:.4%}"
            )
    return largest


def main(arguments: list[str]) -> int:
    """Compares real or synthetic traces."""
    largest = 0.0
    if arguments[:1] != ["--synthetic"]:
        steps = by_step(Path(arguments[0]))
        if not steps:
            return 2
        for files in steps.values():
            largest = max(largest, compare(files))
        print(f"largest difference: {largest:.4%}")
        return int(largest > TOLERANCE)
    for seed in range(int(arguments[1])):
        with tempfile.TemporaryDirectory() as folder:
            write_synthetic(Path(folder), seed)
            largest = max(largest, compare(by_step(Path(folder))[0]))
    print(f"largest difference: {largest:.4%}")
    return int(largest > TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
