"""Frozen records that cross a process boundary. Nothing here imports torch, nothing here computes.

The words are the project's own vocabulary (docs/architecture.md, Words); lengths are in tokens.
"""

from paceline.types.records import (
    CAUSES,
    STAGES,
    Cause,
    FinishReason,
    Group,
    Outcome,
    Prompt,
    Sample,
    Stage,
    Verdict,
)
from paceline.types.rewards import RewardJob, RewardSpec, Scorer

__all__ = [
    "CAUSES",
    "STAGES",
    "Cause",
    "FinishReason",
    "Group",
    "Outcome",
    "Prompt",
    "RewardJob",
    "RewardSpec",
    "Sample",
    "Scorer",
    "Stage",
    "Verdict",
]
