"""Runs steps of a live run under the framework's profiler and writes their causes. Imports torch.

Starting, stopping and reading happen between steps, outside the step's section: what a profiled step itself pays is
the recording (on a GPU, of kernels only; on a CPU, of every operator, which slows small operators down).
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import ProfilerActivity, profile

from paceline.telemetry.causes.live import runs_after, split_live_step
from paceline.telemetry.causes.records import Basis, StepCauses, append_causes, causes_path
from paceline.telemetry.causes.torch_trace import TorchTrace, read_torch_trace
from paceline.telemetry.causes.windows import self_times
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.sections import ClosedSpan

PROFILES_FOLDER = "profiles"


@dataclass(frozen=True, slots=True)
class ProfileOutcome:
    """What became of a step that was due: its causes, or why there are none."""

    step: int
    causes: StepCauses | None
    problem: str = ""
    was_recorded: bool = True
    """Whether the step ran under the profiler, and so slower than others."""


class StepProfiler:
    """Of one rank: profiles every `every`-th step (0: none) and appends to causes/rank{r}.jsonl.

    A profiler that cannot start, or a trace that cannot be read, costs the step's causes and never the step: the
    reason is in `last.problem`. With `keep_traces` the profiler's own files stay in profiles/, host operators included.
    """

    def __init__(
        self,
        ledger: Ledger,
        run_dir: Path,
        rank: int,
        device: torch.device,
        *,
        every: int,
        keep_traces: bool = False,
    ) -> None:
        self._ledger, self._run_dir, self._rank, self._device = ledger, run_dir, rank, device
        self._every, self._keep_traces = every, keep_traces
        if every and device.type == "cpu":
            # else it prints two lines for every profiled step; on a device its warnings say why there are no kernels
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self.last: ProfileOutcome | None = None
        """Of the last step, None where it was not due."""

    def is_due(self, step: int) -> bool:
        """Whether the step is one of those to profile."""
        return self._every > 0 and step % self._every == 0

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """The ledger's section of a step, profiled when it is due. A step that fails is not written."""
        self.last = None
        if not self.is_due(step):
            with self._ledger.step(step):
                yield
            return
        with self._ledger.span("setup", "start profiler"):
            began = time.perf_counter()
            profiler, problem = self._start()
            overhead_s = time.perf_counter() - began
        offset_ns = _unix_offset_ns()
        spans: list[ClosedSpan] = []
        try:
            with self._ledger.step(step, spans):
                yield
        except BaseException:  # whatever it is, the profiler must not go on recording; raised on
            if profiler is not None:
                profiler.stop()
            raise
        if profiler is None:
            self.last = ProfileOutcome(step, None, problem, was_recorded=False)
            return
        with self._ledger.span("setup", "read profile"):
            self.last = self._finish(profiler, step, spans, offset_ns, overhead_s)

    def _start(self) -> tuple[profile | None, str]:
        if _profiler_enabled():  # starting a second one would end the first without a word
            return None, "another profiler is active"
        on_gpu = self._device.type == "cuda"
        activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
        if on_gpu and self._keep_traces:
            activities.append(ProfilerActivity.CPU)
        profiler = profile(activities=activities)
        try:
            if on_gpu:
                torch.cuda.synchronize(self._device)  # work of the step before is not this step's
            profiler.start()
        except RuntimeError as error:  # another profiler holds the device, or the driver forbids counters
            return None, f"the profiler did not start: {error}"
        return profiler, ""

    def _finish(
        self, profiler: profile, step: int, spans: list[ClosedSpan], offset_ns: int, overhead_s: float
    ) -> ProfileOutcome:
        began = time.perf_counter()
        section = self._ledger.last_section
        assert section is not None and section.step == step
        if self._device.type == "cuda":
            torch.zeros(1, device=self._device)  # a kernel after the step: see `is_complete`
            torch.cuda.synchronize(self._device)
        try:
            profiler.stop()
            trace = self._read(profiler, step)
        except (RuntimeError, OSError, ValueError) as error:  # a profile that is lost costs no run
            return ProfileOutcome(step, None, f"its trace was lost: {error}")
        start_ns, end_ns = section.start_ns, section.start_ns + section.wall_ns
        basis: Basis = "device" if self._device.type == "cuda" else "operators"
        origin_s = _trace_time_s(trace, start_ns + offset_ns)
        causes = split_live_step(trace, self_times(spans, start_ns, end_ns), step, basis, origin_s)
        is_complete = basis == "operators" or runs_after(trace, origin_s + section.wall_s)
        causes = causes.with_profiler(overhead_s + time.perf_counter() - began, is_complete)
        append_causes(causes_path(self._run_dir, self._rank), causes)
        problem = "" if is_complete else "the profiler's buffers were full before the step's end"
        return ProfileOutcome(step, causes, problem)

    def _read(self, profiler: profile, step: int) -> TorchTrace:
        if self._keep_traces:
            folder = self._run_dir / PROFILES_FOLDER
            folder.mkdir(exist_ok=True)
            path = folder / f"step{step}.rank{self._rank}.json.gz"
            profiler.export_chrome_trace(str(path))
            return read_torch_trace(path)
        with tempfile.TemporaryDirectory(prefix="paceline-profile-") as aside:
            path = Path(aside) / "trace.json"
            profiler.export_chrome_trace(str(path))
            return read_torch_trace(path)


def _unix_offset_ns() -> int:
    """Unix time minus the ledger's clock (`time.perf_counter_ns`), from the closest of several looks."""
    looks = []
    for _ in range(5):
        before = time.perf_counter_ns()
        unix = time.time_ns()
        after = time.perf_counter_ns()
        looks.append((after - before, unix - (before + after) // 2))
    return min(looks)[1]


def _trace_time_s(trace: TorchTrace, unix_ns: int) -> float:
    """A Unix time in the trace's clock.

    Raises:
        ValueError: the trace does not say how its clock relates to Unix time.
    """
    if trace.base_ns is None:
        raise ValueError(f"{trace.path}: no baseTimeNanoseconds in it")
    return (
        unix_ns - trace.base_ns
    ) / 1e9  # whole nanoseconds first: a float has too few digits for Unix time
