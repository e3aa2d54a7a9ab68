"""CPU and memory of this process, its children (reward workers) and the machine. Torch-free."""

import os
import time

import psutil

from paceline.telemetry.device.records import HostFigures


class HostSource:
    """Called, gives what was used since the last call."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._num_cores = os.cpu_count() or 1
        self._cpu_s: dict[int, float] = {}
        self._host_busy_s = 0.0
        self._at = time.perf_counter()
        self()

    def __call__(self) -> HostFigures:
        """One look, some milliseconds where many processes run."""
        now = time.perf_counter()
        elapsed_s = max(now - self._at, 1e-6)
        self._at = now
        children, rss = self._children()
        before, self._cpu_s = self._cpu_s, {self._process.pid: _cpu_s(self._process), **children}
        # a child that is new has used its time since the last look; one that has ended takes its time with it
        used = {pid: seconds - before.get(pid, 0.0) for pid, seconds in self._cpu_s.items()}
        own = used.pop(self._process.pid)
        busy_before, self._host_busy_s = self._host_busy_s, _busy_s()
        return HostFigures(
            process_cpu=own / elapsed_s,
            children_cpu=sum(used.values()) / elapsed_s,
            host_cpu=(self._host_busy_s - busy_before) / elapsed_s,
            host_num_cores=self._num_cores,
            process_rss=int(self._process.memory_info().rss),
            children_rss=rss,
            host_memory_used=int(psutil.virtual_memory().used),
            num_children=len(children),
        )

    def _children(self) -> tuple[dict[int, float], int]:
        """CPU seconds by process id, and resident memory of all."""
        cpu_s: dict[int, float] = {}
        rss = 0
        for child in self._process.children(recursive=True):
            try:
                cpu_s[child.pid] = _cpu_s(child)
                rss += child.memory_info().rss
            except psutil.Error:  # it has ended in the meantime
                continue
        return cpu_s, rss


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0))
