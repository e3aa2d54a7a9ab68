"""causes/rank{r}.jsonl: the six cells of every stage of a profiled step, and its kernels. Written and read here.

Both a live run's profiled steps and imported traces write through `cause_lines`, so that a reader needs not know where
a run came from. Torch-free.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from paceline.telemetry.causes.cells import Cells
from paceline.telemetry.jsonl import current_steps, open_append, read_lines
from paceline.types import CAUSES

RECORD_VERSION = 1
CAUSES_FOLDER = "causes"
UNACCOUNTED = "unaccounted"
"""In place of a stage: time of the step in no stage."""

Basis = Literal["device", "operators"]
"""What compute and memory are taken from: kernels of a device, or, without one, operators of the host."""


@dataclass(frozen=True, slots=True)
class KernelTotal:
    """A kernel (on a CPU an operator): the cell its time counts for, whether a pattern knows it, calls, seconds.

    Kernels overlap, so their seconds may add up to more than a cell's.
    """

    name: str
    cell: str
    library: str
    is_known: bool
    count: int
    total_s: float


@dataclass(frozen=True, slots=True)
class StepCauses:
    """One profiled step of a rank. The cells of a stage add up to its self-time, the stages to the step."""

    step: int
    cells: Mapping[str, Cells]
    """Seconds by stage (and `unaccounted`) and cause."""
    kernels: tuple[KernelTotal, ...] = ()
    basis: Basis = "device"
    profiler_s: float = 0.0
    """Seconds to start, stop and read the profiler, before and after the step and in no cell of it."""
    is_complete: bool = True
    """Whether the profiler recorded to the step's end. Where its buffers were full before, what ran after counts as
    nothing running."""

    @property
    def seconds(self) -> float:
        """All cells of all stages."""
        return sum(sum(cells.values()) for cells in self.cells.values())

    def with_profiler(self, profiler_s: float, is_complete: bool) -> "StepCauses":
        """The same with what is known once it has been read."""
        return replace(self, profiler_s=profiler_s, is_complete=is_complete)

    def unknown_kernels(self) -> tuple[KernelTotal, ...]:
        """Kernels that no pattern knows; their time counts as compute."""
        return tuple(kernel for kernel in self.kernels if not kernel.is_known)


@dataclass(frozen=True, slots=True)
class RankCauses:
    """A rank's file. `num_torn_lines` counts lines a killed process left half-written."""

    rank: int
    steps: tuple[StepCauses, ...]
    num_torn_lines: int = 0


_NO_HEAD = {"basis": "device", "profiler_s": 0.0, "is_complete": False}
"""Where a step's head line is torn."""


def causes_path(run_dir: Path, rank: int) -> Path:
    """Where a rank's causes are."""
    return run_dir / CAUSES_FOLDER / f"rank{rank}.jsonl"


def cause_lines(step: StepCauses) -> Iterator[dict[str, Any]]:
    """A profiled step as it is written: its head, the cells of its stages, its kernels."""
    common = {"v": RECORD_VERSION, "step": step.step}
    yield {
        **common,
        "kind": "step",
        "basis": step.basis,
        "profiler_s": step.profiler_s,
        "is_complete": step.is_complete,
    }
    for stage, cells in step.cells.items():
        yield {**common, "kind": "cells", "stage": stage, **{f"{cause}_s": cells[cause] for cause in CAUSES}}
    for kernel in step.kernels:
        yield {
            **common,
            "kind": "kernel",
            "name": kernel.name,
            "cell": kernel.cell,
            "library": kernel.library,
            "is_known": kernel.is_known,
            "count": kernel.count,
            "total_s": kernel.total_s,
        }


def append_causes(path: Path, step: StepCauses) -> None:
    """Appends a profiled step to a rank's file, which a killed process may have left with half a line."""
    with open_append(path) as file:
        file.write("".join(f"{json.dumps(line)}\n" for line in cause_lines(step)))


def read_causes(run_dir: Path) -> tuple[RankCauses, ...]:
    """Every rank's profiled steps, by rank. Empty when none was profiled.

    Raises:
        ValueError: a record of a version or kind that is not known here.
    """
    folder = run_dir / CAUSES_FOLDER
    files = sorted(folder.glob("rank*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank")))
    return tuple(_read_rank(path) for path in files)


@dataclass(slots=True)
class _Open:
    """A step whose lines are being read."""

    head: Mapping[str, Any]
    cells: dict[str, Cells] = field(default_factory=dict)
    kernels: list[KernelTotal] = field(default_factory=list)

    def finished(self) -> StepCauses:
        head = self.head
        basis: Basis = "operators" if head["basis"] == "operators" else "device"
        return StepCauses(
            head["step"], self.cells, tuple(self.kernels), basis, head["profiler_s"], head["is_complete"]
        )


def _read_rank(path: Path) -> RankCauses:
    steps: list[_Open] = []
    num_torn = 0
    for record in read_lines(path):
        if record is None:
            num_torn += 1
        else:
            _take(record, steps, path)
    # a step done again after a resume is there twice; the later one counts
    current = current_steps((step.finished() for step in steps), lambda step: step.step)
    return RankCauses(int(path.stem.removeprefix("rank")), tuple(current), num_torn)


def _take(record: Mapping[str, Any], steps: list[_Open], path: Path) -> None:
    if record["v"] != RECORD_VERSION:
        raise ValueError(
            f"{path}: a record of version {record['v']}; this paceline reads version {RECORD_VERSION}"
        )
    kind = record["kind"]
    if kind == "step":
        steps.append(_Open(record))
        return
    if not steps or steps[-1].head["step"] != record["step"]:  # the head's line is torn
        steps.append(_Open({**_NO_HEAD, "step": record["step"]}))
    if kind == "cells":
        steps[-1].cells[record["stage"]] = {cause: record[f"{cause}_s"] for cause in CAUSES}
    elif kind == "kernel":
        names = ("name", "cell", "library", "is_known", "count", "total_s")
        steps[-1].kernels.append(KernelTotal(**{name: record[name] for name in names}))
    else:
        raise ValueError(f"{path}: a record of kind {kind!r}; version {RECORD_VERSION} has no such kind")


def total_cells(steps: Iterable[StepCauses]) -> dict[str, Cells]:
    """Seconds by stage and cause over steps."""
    result: dict[str, Cells] = {}
    for step in steps:
        for stage, cells in step.cells.items():
            into = result.setdefault(stage, dict.fromkeys(CAUSES, 0.0))
            for cause in CAUSES:
                into[cause] += cells[cause]
    return result
