"""The progress of a run, apart from what it is made of."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RunState:
    """What a checkpoint carries beside tensors: progress and figures that belong to the whole run."""

    step: int = 0
    figures: dict[str, Any] = field(default_factory=dict)
