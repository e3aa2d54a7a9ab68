"""Figures of one NVIDIA device through its management library (NVML). Torch-free.

SM, tensor and DRAM activity come from GPM counters, which Hopper and later devices have; they are differences of two
looks, so the first look gives none. NVML reads counters that the driver keeps anyway and waits for no kernel.
"""

from typing import Any

from paceline.telemetry.device.records import DeviceFigures

try:
    import pynvml
except ImportError:  # the extra `nvidia` is not installed; the sampler says so
    pynvml = None

_GPM_FIGURES = ("sm_activity", "tensor_activity", "dram_activity")


class NoSourceError(RuntimeError):
    """The device cannot be asked; the message says why."""


class NvmlSource:
    """Called, gives the figures of one device, known by its UUID (`GPU-...`).

    Raises:
        NoSourceError: the library, the driver or the device is not there.
    """

    name = "nvml"

    def __init__(self, uuid: str, nvml: Any = pynvml) -> None:
        if nvml is None:
            raise NoSourceError("nvidia-ml-py is not installed: pip install paceline[nvidia]")
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError as error:
            raise NoSourceError(f"NVML: {error}") from error
        self._gpm_samples = self._open_gpm()

    def __call__(self) -> DeviceFigures:
        """One look. A figure the device does not have is None."""
        nvml, handle = self._nvml, self._handle
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        activity = dict.fromkeys(_GPM_FIGURES, None) | self._gpm()
        busy = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
        power = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return DeviceFigures(
            utilization=None if busy is None else busy / 100,
            sm_activity=activity["sm_activity"],
            tensor_activity=activity["tensor_activity"],
            dram_activity=activity["dram_activity"],
            power_w=None if power is None else power / 1000,
            sm_clock_mhz=self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            memory_clock_mhz=self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            memory_used=int(memory.used),
            memory_total=int(memory.total),
            temperature_c=self._ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        )

    def close(self) -> None:
        """Gives back what the library holds."""
        for sample in self._gpm_samples or ():
            self._nvml.nvmlGpmSampleFree(sample)
        self._gpm_samples = None
        self._nvml.nvmlShutdown()

    def _ask(self, question: Any) -> float | None:
        """None where this kind of device does not answer (a vGPU has no power, a MIG slice no utilisation)."""
        try:
            return float(question())
        except (self._nvml.NVMLError_NotSupported, self._nvml.NVMLError_NoPermission):
            return None

    def _open_gpm(self) -> list[Any] | None:
        """Two samples, the older first, or None where the device has no GPM counters."""
        nvml = self._nvml
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(self._handle).isSupportedDevice:
                return None
            samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
            nvml.nvmlGpmSampleGet(self._handle, samples[1])
        except (
            nvml.NVMLError
        ):  # a driver before GPM, or one that forbids counters: the other figures do without
            return None
        return samples

    def _gpm(self) -> dict[str, float]:
        if self._gpm_samples is None:
            return {}
        nvml = self._nvml
        older, newer = self._gpm_samples = self._gpm_samples[::-1]
        nvml.nvmlGpmSampleGet(self._handle, newer)
        wanted = (
            nvml.NVML_GPM_METRIC_SM_UTIL,
            nvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
            nvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
        )
        query = nvml.c_nvmlGpmMetricsGet_t()
        query.version = nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(wanted)
        query.sample1, query.sample2 = older, newer
        for index, metric in enumerate(wanted):
            query.metrics[index].metricId = metric
        nvml.nvmlGpmMetricsGet(query)
        return {
            name: query.metrics[index].value / 100
            for index, name in enumerate(_GPM_FIGURES)
            if query.metrics[index].nvmlReturn == nvml.NVML_SUCCESS
        }
