"""A run as OpenMetrics text (openmetrics.io, version 1.0.0), for Prometheus and what reads its format."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from paceline.monitor.alarms import alarms_of
from paceline.monitor.families import (
    ALARM,
    LAST_RECORD,
    RANK_FLOPS_SUM,
    RANK_PEAKS,
    RANK_STAGE,
    RANK_STAGE_SUM,
    RANK_STEP,
    RANK_STEPS_SUM,
    RANK_TOKENS_SUM,
    RUN,
    STATUS,
    STEP,
    STEPS_PLANNED,
    TORN,
    UNDECLARED,
    Family,
    place_of,
)
from paceline.monitor.following import ENDED, RankProgress, RunFollower
from paceline.telemetry.metric_schema import MetricSpec, UnknownMetricError, spec_of

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

_STATES = ("starting", "running", *ENDED)

Sample = tuple[Mapping[str, str], float]


class _Exposition:
    """Samples by family; a family's samples have to stand together, whatever order they come in."""

    def __init__(self, run_name: str) -> None:
        self._run_name = run_name
        self._families: dict[str, tuple[Family, list[Sample]]] = {}

    def add(self, family: Family, value: float, **labels: str) -> None:
        _, samples = self._families.setdefault(family.name, (family, []))
        samples.append(({"run": self._run_name, **labels}, value))

    def lines(self) -> Iterator[str]:
        for family, samples in self._families.values():
            yield f"# TYPE {family.name} {family.kind}"
            if family.unit:
                yield f"# UNIT {family.name} {family.unit}"
            yield f"# HELP {family.name} {_escaped(family.help)}"
            for labels, value in samples:
                pairs = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
                yield f"{family.sample_name}{{{pairs}}} {_number(value)}"
        yield "# EOF"


def exposition(run: RunFollower) -> str:
    """Everything that is known of a run, as the follower has last seen it.

    Gauges hold the last recorded step. Counters hold sums over all records in the files, steps done again after a
    resume included, so that they never fall while the files grow.
    """
    out = _Exposition(run.name)
    _add_run(out, run)
    _add_metrics(out, run)
    for rank in run.ranks.values():
        _add_rank(out, rank)
    return "\n".join(out.lines()) + "\n"


def _add_run(out: _Exposition, run: RunFollower) -> None:
    out.add(RUN, 1.0, **_description(run))
    status = run.status
    for state in _STATES:
        out.add(STATUS, float(state == status), **{STATUS.name: state})
    out.add(STEP, run.records[-1].step if run.records else 0)
    if run.num_steps_planned is not None:
        out.add(STEPS_PLANNED, run.num_steps_planned)
    if run.last_growth_unix_s:
        out.add(LAST_RECORD, run.last_growth_unix_s)
    out.add(TORN, run.num_torn_lines + sum(rank.num_torn_lines for rank in run.ranks.values()))
    for alarm in alarms_of(run):
        out.add(ALARM, 1.0, alarm=alarm.name, metric=alarm.metric)


def _add_metrics(out: _Exposition, run: RunFollower) -> None:
    """The last step's values, and the sums over steps. Names of a newer version have no meaning here: counted."""
    last = run.records[-1].metrics if run.records else {}
    num_undeclared = 0
    for name, value in last.items():
        spec = declared(name)
        if spec is None:
            num_undeclared += 1
            continue
        place = place_of(spec)
        out.add(place.gauge, value, **place.labels)
    out.add(UNDECLARED, num_undeclared)
    for name, total in run.metric_totals.items():
        spec = declared(name)
        if spec is not None and (place := place_of(spec)).total is not None:
            out.add(place.total, total, **place.labels)


def _description(run: RunFollower) -> dict[str, str]:
    settings = {
        "algorithm": ("algorithm", "name"),
        "model": ("model", "path"),
        "schedule": ("schedule", "name"),
        "engine": ("rollout", "engine"),
        "device_name": ("cluster", "device_name"),
    }
    return {label: _setting(run.config, *path) for label, path in settings.items()}


def _setting(config: Mapping[str, Any], section: str, key: str) -> str:
    content = config.get(section)
    value = content.get(key) if isinstance(content, Mapping) else None
    return "" if value is None else str(value)


def _add_rank(out: _Exposition, rank: RankProgress) -> None:
    number, totals = str(rank.rank), rank.totals
    if rank.recent:
        last = rank.recent[-1]
        out.add(RANK_STEP, last.wall_s, rank=number)
        for stage, seconds in (*last.stage_s.items(), ("unaccounted", last.unaccounted_s)):
            out.add(RANK_STAGE, seconds, rank=number, stage=stage)
        peaks = {
            "peak_allocated": last.peak_allocated,
            "peak_reserved": last.peak_reserved,
            "host_rss": last.host_rss,
        }
        for name, value in peaks.items():
            out.add(RANK_PEAKS[name], value, rank=number)
    out.add(RANK_STEPS_SUM, totals.num_steps, rank=number)
    for stage, seconds in (*totals.stage_s.items(), ("unaccounted", totals.unaccounted_s)):
        out.add(RANK_STAGE_SUM, seconds, rank=number, stage=stage)
    _add_where_any(out, RANK_TOKENS_SUM, number, totals.stage_tokens.items())
    _add_where_any(out, RANK_FLOPS_SUM, number, totals.stage_flops.items())


def _add_where_any(out: _Exposition, family: Family, rank: str, values: Iterable[tuple[str, float]]) -> None:
    for stage, value in values:
        if value:
            out.add(family, value, rank=rank, stage=stage)


def declared(name: str) -> MetricSpec | None:
    """The declaration of a metric, None where there is none."""
    try:
        return spec_of(name)
    except UnknownMetricError:
        return None


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
