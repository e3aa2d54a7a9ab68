"""What a diagnosis says: numbers and identifiers only. Sentences in a language are made from them by `wording.py`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from paceline.types import Cause

Kind = Cause
"""What bounds a stage: the cause that owns most of its time."""

Source = Literal["causes", "spans", "nature"]
"""How a stage's causes are known: a profiled step; the causes its spans state; or only what such a stage usually is."""

WaitKind = Literal["longest_sample", "slow_rank", "reward", "input", "weights", "checkpoint", "host"]
"""What idle time is spent waiting for. `weights` is the exchange of weights and samples between ranks or engines."""

UNKNOWN_VALUE = "?"
"""A value of a finding that the records do not hold."""

UNACCOUNTED = "unaccounted"
"""The name under which time no span covers stands beside the stages."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number a statement rests on; `unit` is empty for counts, `share` for parts of one."""

    name: str
    value: float
    unit: str = ""


@dataclass(frozen=True, slots=True)
class StageDiagnosis:
    """A stage: mean self-seconds per step over ranks, share of the step, what bounds it, and its cells in seconds per
    step by cause (None where nothing measured them)."""

    stage: str
    seconds: float
    share: float
    kind: Kind
    source: Source
    cells: Mapping[str, float] | None = None
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The stage that takes most of a step, and what bounds it; where that is not `is_measured`, what bounds such a
    stage as a rule."""

    stage: str
    kind: Kind
    seconds: float
    evidence: tuple[Evidence, ...] = ()
    is_measured: bool = True


@dataclass(frozen=True, slots=True)
class Wait:
    """Seconds per step and rank in which nothing is done because of something else. Waits of different kinds do not
    overlap, except that the host is at work in other waits as well, and that a slow rank's cause (its input, its
    reward) is counted where it arises, too."""

    kind: WaitKind
    stage: str
    seconds: float
    low: float
    high: float
    share: float


@dataclass(frozen=True, slots=True)
class Finding:
    """A cost that can be mended: seconds per step with a 95 % interval, and the numbers its sentence needs."""

    id: str
    stage: str
    cause: Cause
    seconds: float
    low: float
    high: float
    values: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Switch:
    """A feature that reduces a finding's cost: predicted seconds saved per step with a 95 % interval, and the settings
    that switch it on. `risk` and `prerequisite` are English; `wording` has the other languages by `feature`.
    `changes_training`: it also changes what is learned (another objective, reward, set of samples or optimisation)."""

    feature: str
    finding: str
    cause: Cause
    saved_s: float
    low: float
    high: float
    risk: str
    prerequisite: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    changes_training: bool = False


@dataclass(frozen=True, slots=True)
class RankDiagnosis:
    """One rank, means per step: wall time, time it was not waiting for other ranks, its token slots and FLOPs of
    update_actor; `excess_s` is how much longer it was busy than the mean of the others."""

    rank: int
    wall_s: float
    busy_s: float
    idle_s: float
    tokens: float
    flops: float
    excess_s: float


@dataclass(frozen=True, slots=True)
class Drift:
    """How step time changes over the run: Theil-Sen slope in seconds per step with a 95 % interval, and what it comes
    to over the whole run. `is_drift`: the interval leaves zero out and the change is not small beside a step."""

    slope_s: float
    low: float
    high: float
    change_s: float
    is_drift: bool


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A run, diagnosed. Seconds are means per step over ranks and over the `num_steps` steps that were used; warm-up
    and profiled ones are left out. `counters` are means per step of what was counted (micro-batches, padding, new
    shapes, preemptions). `notes` say what is not or cannot be known: ids that `wording.note` has sentences for, and an
    importer's own sentences."""

    run_name: str
    num_steps: int
    step_s: float
    stages: tuple[StageDiagnosis, ...]
    bottleneck: Bottleneck | None
    waits: tuple[Wait, ...]
    findings: tuple[Finding, ...]
    switches: tuple[Switch, ...]
    unaccounted_s: float
    notes: tuple[str, ...]
    ranks: tuple[RankDiagnosis, ...] = ()
    drift: Drift | None = None
    counters: Mapping[str, float] = field(default_factory=dict)
    num_warmup_steps: int = 0
    num_profiled_steps: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain mappings and lists, as `paceline diagnose --json` prints them."""
        return {"v": 1, **asdict(self)}
