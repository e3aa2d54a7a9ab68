"""Peak memory of one device between two looks, for the ledger. The only module of telemetry that imports torch."""

import torch

from paceline.telemetry.ledger import MemorySample

_NOTHING = MemorySample()


class DeviceMemorySampler:
    """Called, gives the peaks since the last call (bytes) and starts new ones; `Ledger(sample_memory=...)` takes it.

    On CUDA the peaks are those of torch's caching allocator, so resetting them elsewhere falsifies the figures. A CPU
    has no such counters: its peaks are 0, and the host's resident memory (`host_rss`) is the figure to look at.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def __call__(self) -> MemorySample:
        """Peaks since the last call. Does not wait for the device."""
        if self._device is None or not torch.cuda.is_initialized():
            return _NOTHING
        # one look for both peaks, and nested: flattening the statistics costs more than taking them
        statistics = torch.cuda.memory_stats_as_nested_dict(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return MemorySample(
            peak_allocated=statistics["allocated_bytes"]["all"]["peak"],
            peak_reserved=statistics["reserved_bytes"]["all"]["peak"],
        )
