"""Peak memory of one device between two looks, for the ledger. The only module of telemetry that imports torch."""

import torch

from paceline.telemetry.host_memory import host_rss
from paceline.telemetry.ledger import MemorySample, MemorySampler


def memory_sampler(device: torch.device) -> MemorySampler:
    """A sampler for `Ledger(sample_memory=...)`: called, it gives the peaks (bytes) since the last call, and host RSS.

    On CUDA the peaks are those of torch's caching allocator; a reset of them elsewhere falsifies the figures. A CPU
    has no such counters: its peaks are 0, and the host's resident memory is the figure to look at. Neither waits for
    the device.
    """
    if device.type != "cuda":
        return _host_only
    torch.cuda.reset_peak_memory_stats(device)

    def sample() -> MemorySample:
        peaks = MemorySample(
            peak_allocated=torch.cuda.max_memory_allocated(device),
            peak_reserved=torch.cuda.max_memory_reserved(device),
            host_rss=host_rss(),
        )
        torch.cuda.reset_peak_memory_stats(device)
        return peaks

    return sample


def _host_only() -> MemorySample:
    return MemorySample(host_rss=host_rss())
