"""Writes synthetic torch-profiler traces of a device: known kernels at known times, in Kineto's format."""

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_64x3_tn"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int)"
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
STRANGE = "my_company_secret_kernel_v2"

ORIGIN_US = 5_000_000_000.0


@dataclass
class TraceWriter:
    """Events in milliseconds from the trace's begin."""

    rank: int | None = 0
    world_size: int = 1
    events: list[dict[str, Any]] = field(default_factory=list)

    def kernel(self, name: str, start_ms: float, end_ms: float, stream: int = 7) -> None:
        """Device work."""
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        self._add(category, name, start_ms, end_ms, pid=0, tid=stream)

    def annotation(self, name: str, start_ms: float, end_ms: float, thread: int = 100) -> None:
        """A named range on the host."""
        self._add("user_annotation", name, start_ms, end_ms, pid=100, tid=thread)

    def frame(self, name: str, start_ms: float, end_ms: float) -> None:
        """A Python function on the host's main thread."""
        self._add("python_function", name, start_ms, end_ms, pid=100, tid=100)

    def step(self, number: int, start_ms: float, end_ms: float) -> None:
        """The profiler's step."""
        self.annotation(f"ProfilerStep#{number}", start_ms, end_ms)

    def write(self, path: Path) -> Path:
        """The file, compressed when its name ends in .gz."""
        content: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150_000_000_000}],
            "baseTimeNanoseconds": 1_700_000_000_000_000_000,
            "traceEvents": [
                {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
                *self.events,
            ],
        }
        if self.rank is not None:
            content["distributedInfo"] = {"backend": "nccl", "rank": self.rank, "world_size": self.world_size}
        text = json.dumps(content)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text)
        return path

    def _add(self, category: str, name: str, start_ms: float, end_ms: float, pid: int, tid: int) -> None:
        times = {"ts": ORIGIN_US + start_ms * 1000, "dur": (end_ms - start_ms) * 1000}
        self.events.append({"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times})


def training_step(rank: int = 0, world_size: int = 1, at_ms: float = 0.0, number: int = 1) -> TraceWriter:
    """A step of 100 ms: 10 loading, 50 rollout, 40 update, with kernels at known times."""
    trace = TraceWriter(rank, world_size)
    trace.step(number, at_ms, at_ms + 100)
    trace.annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", at_ms, at_ms + 10)
    trace.annotation("generate_sequences", at_ms + 10, at_ms + 60)
    trace.annotation("update_actor", at_ms + 60, at_ms + 100)
    trace.annotation("mini_batch0", at_ms + 62, at_ms + 99)
    trace.kernel(GEMM, at_ms + 10, at_ms + 30)
    trace.kernel(ELEMENTWISE, at_ms + 25, at_ms + 40, stream=8)  # 5 ms under the product, 10 ms alone
    trace.kernel(GEMM, at_ms + 62, at_ms + 80)
    trace.kernel(NCCL, at_ms + 75, at_ms + 90, stream=20)  # 5 ms hidden, 10 ms exposed
    trace.kernel(STRANGE, at_ms + 92, at_ms + 96)
    return trace
