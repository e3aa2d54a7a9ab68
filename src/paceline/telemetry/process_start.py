"""How long this process has run: time that no ledger could have seen, since there was none yet. Torch-free."""

import os
import sys
import time
from pathlib import Path

import psutil

_claimed_by: set[int] = set()
"""Processes (by id: a forked child is another one) whose age a ledger has counted; seconds must not count twice."""


def process_age_s() -> float:
    """Seconds since this process was started, to about 10 ms on Linux and about 1 s elsewhere."""
    if sys.platform == "linux":
        # psutil adds the ticks to a boot time that the kernel gives in whole seconds
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # `starttime`, field 22 of proc_pid_stat(5)
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    else:
        age_s = time.time() - psutil.Process().create_time()
    return max(0.0, age_s)  # a process younger than the resolution can seem to start after now


def claim_process_age_ns() -> int:
    """The age in nanoseconds for the first caller in this process, 0 for every later one."""
    if os.getpid() in _claimed_by:
        return 0
    _claimed_by.add(os.getpid())
    return int(process_age_s() * 1e9)
