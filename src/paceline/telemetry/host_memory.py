"""Memory of this process on the host. Torch-free."""

import psutil


def host_rss() -> int:
    """Resident set size of the calling process now, in bytes, children not included."""
    return int(psutil.Process().memory_info().rss)
