"""Achieved TFLOP/s and GB/s of every stage against what the device reaches (Williams et al. 2009). Torch-free.

FLOPs by the convention of `flops`, bytes by that of `traffic` (a lower bound). A stage's floor is the time its work
would take at the ceilings, arithmetic and traffic fully overlapped: max(FLOPs / peak, bytes / bandwidth).
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.telemetry.ceilings import Ceilings, ceilings_from, data_sheet_ceilings
from paceline.telemetry.metrics import read_metrics
from paceline.telemetry.records import SectionRecord, read_ledger

Bound = Literal["compute", "memory"]


@dataclass(frozen=True, slots=True)
class StageRoofline:
    """One stage, mean over ranks and steps. None is what is not known: no FLOPs or bytes declared, no ceiling.

    `intensity` is FLOP per byte; `bound` says which ceiling work of it meets first; `floor_share` is the floor over the
    time taken, 1 at best. The shares are of the two ceilings by themselves.
    """

    stage: str
    seconds: float
    tflops: float | None
    gbs: float | None
    intensity: float | None
    compute_share: float | None
    memory_share: float | None
    bound: Bound | None
    floor_share: float | None

    def as_dict(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Roofline:
    """Every stage of a run that declared work, by time, and the ceilings they are held against (None: none known)."""

    stages: tuple[StageRoofline, ...]
    peak_tflops: float | None
    peak_gbs: float | None
    ceilings: Ceilings | None

    def as_dict(self) -> dict[str, Any]:
        """As `--json` prints it."""
        return {
            "peak_tflops": self.peak_tflops,
            "peak_gbs": self.peak_gbs,
            "ceilings": None if self.ceilings is None else self.ceilings.as_dict(),
            "stages": {stage.stage: stage.as_dict() for stage in self.stages},
        }


def run_ceilings(environment: Mapping[str, Any]) -> Ceilings | None:
    """What a run's env.json holds: measured ceilings, else those of the data sheet where its device is known."""
    measured = ceilings_from(environment.get("ceilings"))
    return measured or data_sheet_ceilings(environment.get("device_name"))


def read_roofline(run_dir: Path, *, with_profiled: bool = False) -> Roofline:
    """The roofline of a run's steps; those that ran under the profiler are slower and left out unless asked for."""
    path = run_dir / "env.json"
    environment = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    profiled = {record.step for record in read_metrics(run_dir) if record.metrics.get("profiled")}
    steps = [step for ledger in read_ledger(run_dir) for step in ledger.steps()]
    plain = [step for step in steps if step.step not in profiled]
    # a run whose every step was profiled has no others
    sections = steps if with_profiled or not plain else plain
    return roofline_of(sections, run_ceilings(environment), str(environment.get("dtype", "")))


def roofline_of(sections: list[SectionRecord], ceilings: Ceilings | None, dtype: str) -> Roofline:
    """Every stage of the sections (of any ranks) that declared FLOPs or bytes, the longest first."""
    peak_tflops = None if ceilings is None else ceilings.matmul_tflops.get(dtype)
    peak_gbs = None if ceilings is None else ceilings.copy_gbs
    names = dict.fromkeys(name for section in sections for name in section.stages)
    stages = []
    for name in names:
        records = [section.stages[name] for section in sections if name in section.stages]
        seconds = sum(record.self_s for record in records) / len(sections)
        flops = sum(record.flops for record in records) / len(sections)
        num_bytes = sum(record.bytes for record in records) / len(sections)
        if seconds > 0 and (flops or num_bytes):
            stages.append(_stage(name, seconds, flops, num_bytes, peak_tflops, peak_gbs))
    return Roofline(tuple(sorted(stages, key=lambda stage: -stage.seconds)), peak_tflops, peak_gbs, ceilings)


def _stage(
    name: str,
    seconds: float,
    flops: float,
    num_bytes: float,
    peak_tflops: float | None,
    peak_gbs: float | None,
) -> StageRoofline:
    tflops = flops / seconds / 1e12 if flops else None
    gbs = num_bytes / seconds / 1e9 if num_bytes else None
    compute_s = flops / (peak_tflops * 1e12) if peak_tflops and flops else None
    memory_s = num_bytes / (peak_gbs * 1e9) if peak_gbs and num_bytes else None
    bound: Bound | None = None
    if compute_s is not None and memory_s is not None:
        bound = "compute" if compute_s >= memory_s else "memory"
    floors = [one for one in (compute_s, memory_s) if one is not None]
    return StageRoofline(
        stage=name,
        seconds=seconds,
        tflops=tflops,
        gbs=gbs,
        intensity=flops / num_bytes if flops and num_bytes else None,
        compute_share=None if compute_s is None else compute_s / seconds,
        memory_share=None if memory_s is None else memory_s / seconds,
        bound=bound,
        floor_share=max(floors) / seconds if floors else None,
    )
