"""What measures a run beside its ledger: profiled steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.config import Config
from paceline.engine.mesh import RankMesh
from paceline.schedules.display import Display
from paceline.schedules.place import Place
from paceline.telemetry.causes.step_profiler import StepProfiler
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

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """The ledger's section of a step, profiled where that is due."""
        with self._profiler.step(step):
            yield

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
