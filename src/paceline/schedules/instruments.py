"""What measures a run beside its ledger: profiled steps, and samples of device and host."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from paceline.config import Config
from paceline.engine.mesh import RankMesh
from paceline.schedules.display import Display
from paceline.schedules.place import Place
from paceline.telemetry.causes.step_profiler import StepProfiler
from paceline.telemetry.device.npu_smi import NpuSmiSource
from paceline.telemetry.device.nvml import NoSourceError, NvmlSource
from paceline.telemetry.device.sampler import DeviceSampler, DeviceSource
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator, reduce_over_ranks


class Instruments:
    """One per process. A driver opens every step with `step`; the recorder adds `metrics` once it is over."""

    def __init__(self, config: Config, run_dir: Path, ledger: Ledger, place: Place, display: Display) -> None:
        self._mesh: RankMesh = place.mesh
        self._display = display
        self._profiler = StepProfiler(
            ledger,
            run_dir,
            place.mesh.rank,
            place.device,
            every=config.telemetry.profile_every,
            keep_traces=config.telemetry.keep_traces,
        )
        self._sampler: DeviceSampler | None = None
        if every_s := config.telemetry.sample_every_s:
            device = place.device
            self._sampler = DeviceSampler(run_dir, place.mesh.rank, every_s, lambda: device_source(device))

    def close(self) -> None:
        """Ends what runs beside the run."""
        if self._sampler is not None:
            self._sampler.close()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """The ledger's section of a step, profiled where that is due."""
        with self._profiler.step(step):
            yield

    def count(self, metrics: MetricAccumulator) -> None:
        """Adds what is counted within a step to its metrics, before they are reduced over the ranks."""
        if self._sampler is not None:
            metrics.add("device/samples_failed", self._sampler.take_num_failed())

    def metrics(self) -> dict[str, float]:
        """What all ranks' instruments say of the step that has ended. All ranks call it together."""
        outcome = self._profiler.last
        if outcome is None:  # due or not is the same on all ranks
            return {}
        own = MetricAccumulator()
        causes = outcome.causes
        own.add("profiler/lost", int(causes is None))
        own.add("profiler/truncated", int(causes is not None and not causes.is_complete))
        own.add("profiled", int(outcome.was_recorded))
        if causes is not None:
            own.add("profiler/seconds", causes.profiler_s)
        if outcome.problem:
            self._display.note(f"  profile of step {outcome.step}: {outcome.problem}")
        return reduce_over_ranks(self._mesh.gather_objects(own))


def open_instruments(
    stack: ExitStack, config: Config, run_dir: Path, ledger: Ledger, place: Place, display: Display
) -> Instruments:
    """A run's instruments, closed when `stack` is."""
    instruments = Instruments(config, run_dir, ledger, place, display)
    stack.callback(instruments.close)
    return instruments


def device_source(device: torch.device) -> DeviceSource:
    """What the figures of this rank's device come from.

    Raises:
        NoSourceError: there is no device, or it cannot be asked.
    """
    if device.type == "cuda":
        # by its UUID: CUDA_VISIBLE_DEVICES renumbers what torch sees and not what the driver sees
        return NvmlSource(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    if device.type == "npu":
        return NpuSmiSource(device.index or 0)
    raise NoSourceError("the run is on the CPU")
