"""Memory of this process on the host. Torch-free."""

import os

import psutil

_PROCESS = psutil.Process()


def host_rss() -> int:
    """Resident set size of this process now, in bytes; of a forked child, the child's own."""
    process = _PROCESS if _PROCESS.pid == os.getpid() else psutil.Process()
    return int(process.memory_info().rss)
