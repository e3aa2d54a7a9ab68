"""The OpenMetrics families of a run: names, types, units and labels, all of them from the metric schema."""

from dataclasses import dataclass, field
from typing import Literal

from paceline.telemetry.metric_schema import METRICS, MetricSpec

Kind = Literal["gauge", "counter", "info", "stateset"]

PREFIX = "paceline_"

# our unit: the suffix that OpenMetrics wants, and how names that end in the unit already end
_UNITS: dict[str, tuple[str, tuple[str, ...]]] = {
    "s": ("seconds", ("_s",)),
    "bytes": ("bytes", ("_bytes",)),
    "share": ("ratio", ("_fraction", "_share")),
    "tokens/s": ("tokens_per_second", ()),
    "TFLOP/s": ("teraflops_per_second", ()),
    "nats": ("nats", ()),
}

_COUNTS = ("samples", "tokens", "updates", "micro-batches", "groups", "rollouts", "steps", "prompts", "rows")
_EVENTS = ("retries", "requests", "waits", "workers", "shapes")
_ADDS_UP = frozenset((*_COUNTS, *_EVENTS, "bytes", "s"))
"""Units whose sums over steps mean something; a sum of losses does not."""


@dataclass(frozen=True, slots=True)
class Family:
    """One family. `labels` are those that every one of its samples has beside the run's name."""

    name: str
    kind: Kind
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()

    @property
    def sample_name(self) -> str:
        """The name that samples have: a counter's ends in `_total`, an info's in `_info`."""
        return self.name + {"counter": "_total", "info": "_info"}.get(self.kind, "")


@dataclass(frozen=True, slots=True)
class MetricPlace:
    """Where a declared metric goes: the last step's value to `gauge`, the sum of all steps to `total`."""

    gauge: Family
    total: Family | None
    labels: dict[str, str] = field(default_factory=dict)


def place_of(spec: MetricSpec) -> MetricPlace:
    """The families of a declared metric."""
    path, labels = _labelled(spec.name)
    unit, endings = _UNITS.get(spec.unit, ("", ()))
    base = _base_name(path, endings)
    unit_suffix = f"_{unit}" if unit and not base.endswith(f"_{unit}") else ""
    name = f"{PREFIX}{base}{unit_suffix}"
    told = "" if unit else f" Unit: {spec.unit}."
    text = _help(spec, labels) + told
    gauge = Family(f"{name}", "gauge", f"{text} Last step.", unit, tuple(labels))
    if spec.reduction != "sum" or spec.unit not in _ADDS_UP:
        return MetricPlace(gauge, None, labels)
    total = Family(
        f"{PREFIX}sum_{base}{unit_suffix}", "counter", f"{text} Sum over steps.", unit, tuple(labels)
    )
    return MetricPlace(gauge, total, labels)


def _labelled(name: str) -> tuple[str, dict[str, str]]:
    """The path without what is a label: a stage's time, FLOP/s and MFU, and a reward source's figures."""
    head, _, rest = name.partition("/")
    if head in ("time", "tflops", "mfu"):
        return ("step_" + head, {}) if rest == "step" else ("stage_" + head, {"stage": rest})
    parts = name.split("/")
    if head == "reward" and len(parts) == 3:
        return f"reward_source/{parts[2]}", {"source": parts[1]}
    return name, {}


def _base_name(path: str, endings: tuple[str, ...]) -> str:
    base = path.replace("/", "_").replace("_tokens_per_s", "")
    ending = next((one for one in endings if base.endswith(one)), "")
    return base.removesuffix(ending)


def _help(spec: MetricSpec, labels: dict[str, str]) -> str:
    if "stage" not in labels:
        return spec.description
    return {
        "time": "Self-time of a stage in the step, mean over ranks; unaccounted is what no span covered.",
        "tflops": "Model FLOPs of a stage per second of its self-time and device.",
        "mfu": "Model FLOPs of a stage per second of its self-time and device, over the peak.",
    }[spec.name.partition("/")[0]]


STEP = Family("paceline_step", "gauge", "Last step that was recorded.")
STEPS_PLANNED = Family("paceline_steps_planned", "gauge", "Steps the run is to make.")
STATUS = Family("paceline_run_status", "stateset", "How the run stands.")
RUN = Family(
    "paceline_run", "info", "What runs.", labels=("algorithm", "model", "schedule", "engine", "device_name")
)
LAST_RECORD = Family(
    "paceline_last_record_timestamp_seconds",
    "gauge",
    "Unix time at which a record was last added.",
    "seconds",
)
ALARM = Family("paceline_alarm", "gauge", "1 for every alarm that stands.", labels=("alarm", "metric"))
TORN = Family("paceline_torn_lines", "gauge", "Half-written lines of killed processes in the run's records.")
UNDECLARED = Family(
    "paceline_undeclared_metrics",
    "gauge",
    "Metrics of the last record that this paceline does not declare, and so does not show.",
)

RANK_STEP = Family(
    "paceline_rank_step_seconds", "gauge", "Wall time of a rank's last step.", "seconds", ("rank",)
)
RANK_STAGE = Family(
    "paceline_rank_stage_seconds",
    "gauge",
    "Self-time of a stage in a rank's last step; unaccounted is what no span covered.",
    "seconds",
    ("rank", "stage"),
)
RANK_STAGE_SUM = Family(
    "paceline_sum_rank_stage_seconds",
    "counter",
    "Self-time of a stage over all steps of a rank; unaccounted is what no span covered.",
    "seconds",
    ("rank", "stage"),
)
RANK_TOKENS_SUM = Family(
    "paceline_sum_rank_stage_tokens",
    "counter",
    "Tokens a stage declared, over all steps of a rank.",
    "tokens",
    ("rank", "stage"),
)
RANK_FLOPS_SUM = Family(
    "paceline_sum_rank_stage_flops",
    "counter",
    "Model FLOPs a stage declared, over all steps of a rank.",
    "flops",
    ("rank", "stage"),
)
RANK_STEPS_SUM = Family(
    "paceline_sum_rank_steps", "counter", "Steps a rank has made, those done again included.", "", ("rank",)
)
RANK_PEAKS = {
    name: Family(f"paceline_rank_memory_{name}_bytes", "gauge", text, "bytes", ("rank",))
    for name, text in (
        ("peak_allocated", "Most device memory held by tensors in a rank's last step; 0 on a CPU."),
        ("peak_reserved", "Most device memory held by the allocator in a rank's last step; 0 on a CPU."),
        ("host_rss", "Most resident host memory of a rank's process in its last step."),
    )
}

RUN_FAMILIES = (STEP, STEPS_PLANNED, STATUS, RUN, LAST_RECORD, ALARM, TORN, UNDECLARED)
RANK_FAMILIES = (
    RANK_STEP,
    RANK_STAGE,
    RANK_STAGE_SUM,
    RANK_TOKENS_SUM,
    RANK_FLOPS_SUM,
    RANK_STEPS_SUM,
    *RANK_PEAKS.values(),
)


def all_families() -> dict[str, Family]:
    """Every family that an endpoint can show, by name."""
    found = {family.name: family for family in (*RUN_FAMILIES, *RANK_FAMILIES)}
    for spec in METRICS.values():
        place = place_of(spec)
        found[place.gauge.name] = place.gauge
        if place.total is not None:
            found[place.total.name] = place.total
    return found
