"""Metrics of a step: accumulated under their declared reduction, logged as JSON lines, read back. Torch-free."""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from paceline.telemetry.jsonl import current_steps, decode_number, encode_number, open_append, read_lines
from paceline.telemetry.metric_schema import (
    METRICS,
    MetricSpec,
    Reduction,
    UnknownMetricError,
    metric_table,
    spec_of,
)
from paceline.telemetry.sinks import MetricSink

__all__ = [
    "METRICS",
    "MetricAccumulator",
    "MetricHistory",
    "MetricLog",
    "MetricRecord",
    "MetricSink",
    "MetricSpec",
    "Reduction",
    "UnknownMetricError",
    "metric_table",
    "read_metric_history",
    "read_metrics",
    "reduce_over_ranks",
    "spec_of",
]

METRICS_FILE = "metrics.jsonl"
RECORD_VERSION = 1


@dataclass(slots=True)
class _Collected:
    """What was added under one name: the terms themselves, so that a sum does not depend on how they were split."""

    terms: list[float] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)


class MetricAccumulator:
    """Collects values of one step; may be filled in parts (micro-batches, ranks) and merged.

    Sums and weighted means are summed exactly and rounded once, so the result is the same bit for bit for every
    split and order of the same values. A mean of means never occurs: weights travel with the values.
    """

    def __init__(self) -> None:
        self._collected: dict[str, _Collected] = {}

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Adds an observation. `weight` matters to means only: how many tokens (or samples) `value` is a mean of.

        A weight of 0 says that nothing was observed: a mean, maximum, minimum or last value ignores it. Sums take the
        value whatever the weight.

        Raises:
            UnknownMetricError: the name is not declared.
            ValueError: the weight is negative or not finite.
        """
        spec = spec_of(name)
        value, weight = float(value), float(weight)
        if not 0.0 <= weight < math.inf:
            raise ValueError(f"metric {name!r}: weight {weight} must be finite and at least 0")
        collected = self._collected.setdefault(name, _Collected())
        if spec.reduction == "sum":
            collected.terms.append(value)
        elif weight == 0.0:
            return
        elif spec.reduction == "mean":
            collected.terms.append(value * weight)
            collected.weights.append(weight)
        else:
            collected.terms = [_FOLDS[spec.reduction]([*collected.terms, value])]

    def merge(self, other: "MetricAccumulator") -> None:
        """Takes in what `other` collected, as if its values had been added here, after those already here."""
        for name, theirs in other._collected.items():
            mine = self._collected.setdefault(name, _Collected())
            mine.terms.extend(theirs.terms)
            mine.weights.extend(theirs.weights)

    def reduce(self) -> dict[str, float]:
        """One value per name by its declared reduction, in the order of first use.

        A name for which nothing was observed (a mean of total weight 0) is absent rather than 0 or nan.
        """
        reduced: dict[str, float] = {}
        for name, collected in self._collected.items():
            if not collected.terms:
                continue
            reduction = spec_of(name).reduction
            if reduction == "mean":
                reduced[name] = _exact_sum(collected.terms) / _exact_sum(collected.weights)
            else:
                reduced[name] = _FOLDS[reduction](collected.terms)
        return reduced


def reduce_over_ranks(accumulators: Sequence[MetricAccumulator]) -> dict[str, float]:
    """One step's values from all ranks' accumulators, in order of ranks: as if one process had observed everything.

    Each observation is added on one rank only: on the one that made it, or, where all know it alike, on the first.
    """
    together = MetricAccumulator()
    for accumulator in accumulators:
        together.merge(accumulator)
    return together.reduce()


def _exact_sum(terms: list[float]) -> float:
    try:
        return math.fsum(terms)
    except (OverflowError, ValueError):  # beyond the largest float, or inf - inf: what plain addition gives
        return sum(terms)


def _largest(terms: list[float]) -> float:
    return math.nan if any(map(math.isnan, terms)) else max(terms)


def _smallest(terms: list[float]) -> float:
    return math.nan if any(map(math.isnan, terms)) else min(terms)


def _latest(terms: list[float]) -> float:
    return terms[-1]


_FOLDS: dict[str, Callable[[list[float]], float]] = {
    "sum": _exact_sum,
    "max": _largest,
    "min": _smallest,
    "last": _latest,
}


class MetricLog:
    """Appends one line per step to `metrics.jsonl` in the run's folder and hands the same to every sink.

    A line is with the operating system when `record` returns: a killed process loses no recorded step. JSON has no
    nan and no infinities, so these are written as the strings "nan", "inf" and "-inf".
    """

    def __init__(self, run_dir: Path, sinks: Iterable[MetricSink] = ()) -> None:
        """Opens the file for appending; closes `sinks` (see `sinks.open_sinks`) when it is closed."""
        self.path = run_dir / METRICS_FILE
        self.sinks: list[MetricSink] = list(sinks)
        self._recorded: set[int] = set()
        self._file = open_append(self.path)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the metrics of `step`; 0 is what was measured before the first step.

        Raises:
            UnknownMetricError: a name is not declared.
            ValueError: this log has recorded `step` already; a reader keeps one record of a step.
        """
        if step in self._recorded:
            raise ValueError(f"the metrics of step {step} are recorded already")
        values = {spec_of(name).name: float(value) for name, value in metrics.items()}
        record = {
            "v": RECORD_VERSION,
            "step": step,
            "time": time.time(),
            "metrics": {name: encode_number(value) for name, value in values.items()},
        }
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        self._recorded.add(step)
        for sink in self.sinks:
            sink.write(step, values)

    def close(self) -> None:
        """Closes the file and every sink."""
        self._file.close()
        for sink in self.sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class MetricRecord:
    """The metrics of one step; `unix_s` is when they were written."""

    step: int
    unix_s: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class MetricHistory:
    """A run's metrics by step. `num_replaced` counts records that no longer count because the run was resumed before
    them (see `jsonl.current_steps`), `num_torn_lines` lines that a killed process left half-written."""

    records: tuple[MetricRecord, ...]
    num_replaced: int
    num_torn_lines: int


def read_metric_history(run_dir: Path) -> MetricHistory:
    """Reads `metrics.jsonl`: the records that count, in order of steps. Empty when there is no file.

    Raises:
        ValueError: a record is of another version.
    """
    path = run_dir / METRICS_FILE
    written: list[MetricRecord] = []
    num_torn = 0
    for raw in read_lines(path) if path.exists() else ():
        if raw is None:
            num_torn += 1
            continue
        written.append(_decoded(raw, path))
    records = tuple(current_steps(written, lambda record: record.step))
    return MetricHistory(records, len(written) - len(records), num_torn)


def read_metrics(run_dir: Path) -> list[MetricRecord]:
    """The records of `read_metric_history`."""
    return list(read_metric_history(run_dir).records)


def _decoded(raw: dict[str, Any], path: Path) -> MetricRecord:
    if raw["v"] != RECORD_VERSION:
        raise ValueError(
            f"{path}: a record of version {raw['v']}; this paceline reads version {RECORD_VERSION}"
        )
    metrics = {name: decode_number(value) for name, value in raw["metrics"].items()}
    return MetricRecord(raw["step"], raw["time"], metrics)
