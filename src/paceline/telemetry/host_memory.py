"""Memory of this process on the host. Torch-free."""

import os
from functools import lru_cache

import psutil


def host_rss() -> int:
    """Resident set size of the calling process now, in bytes, children not included."""
    return int(_process(os.getpid()).memory_info().rss)


@lru_cache(maxsize=1)
def _process(pid: int) -> psutil.Process:
    """Found once, because finding it costs more than asking it; by id, because a forked child is another process."""
    return psutil.Process(pid)
