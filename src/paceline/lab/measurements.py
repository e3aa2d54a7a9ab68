"""What one run of an ablation measured, read from its folder."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.lab.results import ArmFigures
from paceline.telemetry.metrics import read_metrics
from paceline.types import STAGES

TOKENS_PER_S = "tokens_per_s_per_device"

_TIME_WEIGHTED = {TOKENS_PER_S: "throughput/tokens_per_s_per_device", "mfu": "mfu/step"}
_LARGEST = {"peak_memory": "memory/peak_allocated", "host_memory": "memory/host_rss"}
_MEANS = {"effective_share": "tokens/effective_share", "reward": "reward/mean", "loss": "loss/total"}
FIGURES = (*_TIME_WEIGHTED, *_LARGEST, *_MEANS)
"""Names of the figures beside times, in the order of the table."""

_ENVIRONMENT = ("device", "device_name", "num_ranks", "num_threads", "dtype", "platform")
_PACKAGES = ("torch", "transformers", "triton", "flash-attn-4")


@dataclass(frozen=True, slots=True)
class Measurement:
    """A run's metrics by step, from 1."""

    folder: Path
    metrics: Mapping[int, Mapping[str, float]]

    @property
    def profiled(self) -> set[int]:
        """Steps under the profiler, which are slower than others."""
        return {step for step, values in self.metrics.items() if values.get("profiled", 0.0) > 0}

    def series(self, name: str, steps: Iterable[int]) -> list[float]:
        """A metric's values in those of `steps` that have it."""
        return [self.metrics[step][name] for step in steps if name in self.metrics.get(step, {})]

    def step_s(self, steps: Sequence[int]) -> float:
        """Mean seconds of these steps, all of which the run has made."""
        return fmean(self.metrics[step]["time/step"] for step in steps)

    def stage_s(self, steps: Sequence[int]) -> dict[str, float]:
        """Mean self-seconds of every stage that ran; time that no span covers is `unaccounted`."""
        means = {
            stage: sum(self.series(f"time/{stage}", steps)) / len(steps) for stage in (*STAGES, "unaccounted")
        }
        return {stage: seconds for stage, seconds in means.items() if seconds > 0}

    def figures(self, steps: Sequence[int]) -> dict[str, float]:
        """The figures of `FIGURES` that the run has and that are finite: rates weighted by time, memory as the
        largest, the others as means."""
        found: dict[str, float] = {}
        for name, metric in _TIME_WEIGHTED.items():
            having = [step for step in steps if metric in self.metrics.get(step, {})]
            seconds = sum(self.series("time/step", having))
            if seconds > 0:
                weighted = zip(self.series(metric, having), self.series("time/step", having), strict=True)
                found[name] = sum(value * time for value, time in weighted) / seconds
        for name, metric in _LARGEST.items():
            if values := self.series(metric, steps):
                found[name] = max(values)
        for name, metric in _MEANS.items():
            if values := self.series(metric, steps):
                found[name] = fmean(values)
        return {name: value for name, value in found.items() if math.isfinite(value)}


def measure(folder: Path) -> Measurement:
    """Reads a finished run."""
    return Measurement(folder, {r.step: r.metrics for r in read_metrics(folder) if r.step > 0})


def arm_figures(name: str, runs: Sequence[Measurement], steps: Sequence[int]) -> ArmFigures | None:
    """Means over an arm's runs; None where it has none."""
    if not runs:
        return None
    figures = [run.figures(steps) for run in runs]
    stages = [run.stage_s(steps) for run in runs]
    mean = {
        key: fmean(values) for key in FIGURES if (values := [found[key] for found in figures if key in found])
    }
    return ArmFigures(
        name=name,
        num_runs=len(runs),
        step_s=fmean(run.step_s(steps) for run in runs),
        stages={
            stage: sum(found.get(stage, 0.0) for found in stages) / len(stages)
            for stage in (*STAGES, "unaccounted")
            if any(stage in found for found in stages)
        },
        **{key: mean.get(key) for key in FIGURES},
    )


def same_sample_steps(first: Path, second: Path, steps: Sequence[int]) -> int:
    """How many steps from the first on were trained on the same samples in both runs, by what both wrote down."""
    for count, step in enumerate(steps):
        if _completions(first, step) != _completions(second, step):
            return count
    return len(steps)


def _completions(folder: Path, step: int) -> list[tuple[Any, ...]] | None:
    path = folder / "samples" / f"step{step}.jsonl"
    if not path.exists():
        return None
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [(row["prompt_id"], row["sample_index"], row["seed"], row["completion"]) for row in rows]


def environment_of(folder: Path) -> dict[str, Any]:
    """Of env.json what results depend on: device, processor, precision, versions."""
    path = folder / "env.json"
    if not path.exists():
        return {}
    record = json.loads(path.read_text(encoding="utf-8"))
    found = {name: record.get(name) for name in _ENVIRONMENT}
    cpu = record.get("cpu", {})
    found["cpu"] = {name: cpu.get(name) for name in ("model", "num_usable_cores")}
    packages = record.get("packages", {})
    found["packages"] = {name: packages[name] for name in _PACKAGES if name in packages}
    return found
