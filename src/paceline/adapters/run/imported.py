"""A run of another framework, step by step, in our words, before it is written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

GIB = 2**30


@dataclass(slots=True)
class StageTime:
    """Seconds of a stage in a step, and the tokens it worked on where they are known (0: unknown)."""

    seconds: float
    tokens: int = 0


@dataclass(slots=True)
class ImportedStep:
    """One step. `wall_s` None: the log does not say how long it took, and no time is recorded of it.

    `stages` are in the order in which the framework runs them; `after_s` is time after the step that the log knows of,
    by stage. `metrics` are under our declared names, `foreign` under the framework's, all of them. `unix_s` is when
    the step's line was written.
    """

    step: int
    wall_s: float | None = None
    stages: dict[str, StageTime] = field(default_factory=dict)
    after_s: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    foreign: dict[str, float] = field(default_factory=dict)
    peak_allocated: int = 0
    peak_reserved: int = 0
    unix_s: float | None = None


@dataclass(slots=True)
class ImportedRun:
    """A whole run. `notes` are sentences about what is not known or means something else than it does here."""

    framework: str
    name: str
    steps: list[ImportedStep]
    notes: list[str] = field(default_factory=list)
    config: dict[str, dict[str, Any]] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    samples: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    """Sample records by step, where the framework wrote completions."""
    end_unix_s: float | None = None
    """Latest time that is known of the run, where its lines carry none."""
