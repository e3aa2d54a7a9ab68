"""Peak memory of one device between two looks, for the ledger. The only module of telemetry that imports torch."""

import torch

from paceline.telemetry.host_memory import host_rss
from paceline.telemetry.ledger import MemorySample


class DeviceMemorySampler:
    """Called, gives the peaks since the last call (bytes) and starts new ones; `Ledger(sample_memory=...)` takes it.

    On CUDA the peaks are those of torch's caching allocator, so resetting them elsewhere falsifies the figures. A CPU
    has no such counters: its peaks are 0, and the host's resident memory is the figure to look at.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def __call__(self) -> MemorySample:
        """Peaks since the last call, resident host memory now. Does not wait for the device."""
        if self._device is None:
            return MemorySample(host_rss=host_rss())
        sample = MemorySample(
            peak_allocated=torch.cuda.max_memory_allocated(self._device),
            peak_reserved=torch.cuda.max_memory_reserved(self._device),
            host_rss=host_rss(),
        )
        torch.cuda.reset_peak_memory_stats(self._device)
        return sample
