"""The record of an ablation, `ablation.json`: what was run, every arm's figures, and the verdicts. Torch-free.

An *arm* is one configuration under test: the baseline, one feature, or a combination. A *round* is one run of every
arm; round `i` of an arm is paired with round `i` of the baseline.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.files import write_whole

ABLATION_FILE = "ablation.json"
RECORD_VERSION = 1

BASELINE = "baseline"
"""Name of the arm that everything is compared with."""

Status = Literal["running", "complete"]
RunStatus = Literal["pending", "completed", "failed", "refused"]
Verdict = Literal["faster", "slower", "no_difference", "undecided"]
"""What the interval of the step time supports. `no_difference`: it holds 1 and lies within the margin; `undecided`: it
holds 1 and more than the margin, or there are fewer than four pairs."""
RolloutMode = Literal["replay", "sample"]
"""Whether all runs train on one recorded rollout, or sample anew."""
CorrectnessStatus = Literal["passed", "failed", "not_checked"]
CorrectnessReason = Literal[
    "within_tolerance",
    "beyond_tolerance",
    "not_finite",
    "no_stated_tolerance",
    "inputs_differ",
    "baseline_not_repeatable",
    "no_pairs",
]


@dataclass(frozen=True, slots=True)
class RatioInterval:
    """A ratio to the baseline: geometric mean over pairs, and its interval at `level`; None with fewer than two pairs.

    `p_value` is that of no difference, two-sided; `adjusted_p` after Holm's correction, where one was made.
    """

    ratio: float
    low: float | None
    high: float | None
    level: float
    p_value: float | None
    adjusted_p: float | None = None


@dataclass(frozen=True, slots=True)
class DifferenceInterval:
    """Feature minus baseline, mean over pairs, with its interval at `level`; None with fewer than two pairs."""

    mean: float
    low: float | None
    high: float | None
    level: float


@dataclass(frozen=True, slots=True)
class StageChange:
    """Seconds per step of one stage, mean over runs, and the paired difference."""

    baseline_s: float
    feature_s: float
    difference_s: DifferenceInterval


@dataclass(frozen=True, slots=True)
class FigureChange:
    """A figure of both arms, mean over runs. `ratio` is None where either is not above zero in every pair."""

    baseline: float
    feature: float
    difference: DifferenceInterval
    ratio: RatioInterval | None


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the diagnosis of the baseline run says a feature saves, seconds per step. `ratio` is the step time it leads
    to over the baseline's. For a combination the features' ratios are multiplied."""

    saved_s: float
    low_s: float
    high_s: float
    ratio: float
    ratio_low: float
    ratio_high: float


@dataclass(frozen=True, slots=True)
class Correctness:
    """Whether the arm computes the same as the baseline. `loss_difference` is the largest |loss - baseline's loss| in
    nats of any step of any pair, warm-up included; `grad_norm_difference` the same of gradient norms, relative to the
    baseline's; `repeat_*` are the largest between two runs of the baseline itself. Tolerances are the feature map's."""

    status: CorrectnessStatus
    reason: CorrectnessReason
    tolerance: float | None
    loss_difference: float | None
    grad_norm_difference: float | None
    repeat_loss_difference: float | None
    same_samples: bool | None
    """Whether both trained on the same samples; None where nothing was compared."""
    grad_norm_tolerance: float | None = None
    repeat_grad_norm_difference: float | None = None


@dataclass(frozen=True, slots=True)
class ArmFigures:
    """Means over an arm's runs of the kept steps. Stages are self-seconds per step; memory in bytes, the largest.

    `mfu`, `effective_share`, `reward` and `loss` are None where no run has them.
    """

    name: str
    num_runs: int
    step_s: float
    stages: Mapping[str, float]
    tokens_per_s_per_device: float | None
    mfu: float | None
    peak_memory: float | None
    host_memory: float | None
    effective_share: float | None
    reward: float | None
    loss: float | None


@dataclass(frozen=True, slots=True)
class AblationRow:
    """One feature, or one combination, against the baseline."""

    name: str
    features: tuple[str, ...]
    keys: Mapping[str, Any]
    num_pairs: int
    num_failed: int
    step_time: RatioInterval | None
    verdict: Verdict
    saved_s: DifferenceInterval | None
    stages: Mapping[str, StageChange]
    figures: Mapping[str, FigureChange]
    """`tokens_per_s_per_device`, `mfu`, `peak_memory`, `host_memory`, `effective_share`, `reward` and `loss`, those
    that both arms have."""
    predicted: Prediction | None
    correctness: Correctness
    arm: ArmFigures | None
    message: str = ""


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One run of the plan, in the order in which they are run."""

    arm: str
    round: int
    position: int
    folder: str
    status: RunStatus
    seconds: float | None = None
    message: str = ""


@dataclass(frozen=True, slots=True)
class Ablation:
    """Everything `ablation.json` holds. `alpha` is the chance of any false call over all rows, `margin` the relative
    difference below which step times count as equal, `levels` and the like in shares."""

    name: str
    status: Status
    recipe: str
    overrides: tuple[str, ...]
    alpha: float
    margin: float
    num_pairs: int
    num_steps: int
    num_warmup: int
    dropped_steps: tuple[int, ...]
    replayed: bool
    baseline: ArmFigures | None
    rows: tuple[AblationRow, ...]
    runs: tuple[RunEntry, ...]
    environment: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON, version included."""
        return {"v": RECORD_VERSION, **asdict(self)}


def write_ablation(folder: Path, ablation: Ablation) -> Path:
    """Replaces `ablation.json`; returns its path."""
    path = folder / ABLATION_FILE
    text = json.dumps(ablation.as_dict(), indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(path, text + "\n")
    return path


def read_ablation(folder: Path) -> Ablation:
    """The ablation of a folder (or of the file itself).

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is of a version this paceline does not read.
    """
    path = folder / ABLATION_FILE if folder.is_dir() else folder
    record = json.loads(path.read_text(encoding="utf-8"))
    version = record.pop("v", None)
    if version != RECORD_VERSION:
        raise ValueError(
            f"{path}: a record of version {version}; this paceline reads version {RECORD_VERSION}"
        )
    return Ablation(
        **{
            **record,
            "overrides": tuple(record["overrides"]),
            "dropped_steps": tuple(record["dropped_steps"]),
            "baseline": _arm(record["baseline"]),
            "rows": tuple(_row(row) for row in record["rows"]),
            "runs": tuple(RunEntry(**entry) for entry in record["runs"]),
        }
    )


def _arm(record: dict[str, Any] | None) -> ArmFigures | None:
    return None if record is None else ArmFigures(**record)


def _row(record: dict[str, Any]) -> AblationRow:
    return AblationRow(
        **{
            **record,
            "features": tuple(record["features"]),
            "step_time": _ratio(record["step_time"]),
            "saved_s": _difference(record["saved_s"]),
            "stages": {name: _stage(change) for name, change in record["stages"].items()},
            "figures": {name: _figure(change) for name, change in record["figures"].items()},
            "predicted": None if record["predicted"] is None else Prediction(**record["predicted"]),
            "correctness": Correctness(**record["correctness"]),
            "arm": _arm(record["arm"]),
        }
    )


def _ratio(record: dict[str, Any] | None) -> RatioInterval | None:
    return None if record is None else RatioInterval(**record)


def _difference(record: dict[str, Any] | None) -> DifferenceInterval | None:
    return None if record is None else DifferenceInterval(**record)


def _stage(record: dict[str, Any]) -> StageChange:
    return StageChange(
        record["baseline_s"], record["feature_s"], DifferenceInterval(**record["difference_s"])
    )


def _figure(record: dict[str, Any]) -> FigureChange:
    return FigureChange(
        record["baseline"],
        record["feature"],
        DifferenceInterval(**record["difference"]),
        _ratio(record["ratio"]),
    )
