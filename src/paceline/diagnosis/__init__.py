"""From a run's records to its bottleneck, its waits, what is wrong, and which switches would help. Torch-free."""

from paceline.diagnosis.diagnose import diagnose, predict
from paceline.diagnosis.results import (
    UNACCOUNTED,
    Bottleneck,
    Diagnosis,
    Drift,
    Evidence,
    Finding,
    RankDiagnosis,
    StageDiagnosis,
    Switch,
    Wait,
)

__all__ = [
    "UNACCOUNTED",
    "Bottleneck",
    "Diagnosis",
    "Drift",
    "Evidence",
    "Finding",
    "RankDiagnosis",
    "StageDiagnosis",
    "Switch",
    "Wait",
    "diagnose",
    "predict",
]
