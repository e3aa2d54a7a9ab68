"""Metrics by step as loggers of any framework leave them, and TensorBoard event files."""

import importlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from paceline.config.errors import ConfigError

EVENT_FILES = "events.out.tfevents."
"""Beginning of the name of every TensorBoard event file."""


@dataclass(slots=True)
class Log:
    """Metrics by step as they were logged, with the Unix time of each step's line where it is known.

    `num_unread` counts pairs that are no number; `num_replaced` steps that were logged again after a resume.
    """

    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    unix_s: dict[int, float] = field(default_factory=dict)
    num_unread: int = 0
    num_torn_lines: int = 0
    num_replaced: int = 0

    def put(self, step: int, metrics: dict[str, float]) -> None:
        """Takes a step's line. A step that was there already was done again after a resume: what came after it does
        not count any more."""
        if step in self.metrics and self.metrics[step].keys() & metrics.keys():
            for later in [one for one in self.metrics if one >= step]:
                del self.metrics[later]
                self.num_replaced += 1
        self.metrics.setdefault(step, {}).update(metrics)


def read_tensorboard(folder: Path) -> Log:
    """All event files in one folder; a later value of the same step and tag wins.

    Raises:
        ConfigError: the tensorboard package is not installed.
    """
    accumulator = _tensorboard(folder).EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    log = Log()
    for tag in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(tag):
            log.metrics.setdefault(event.step, {})[tag] = event.value
            log.unix_s[event.step] = max(event.wall_time, log.unix_s.get(event.step, 0.0))
    return log


def _tensorboard(folder: Path) -> ModuleType:
    # an extra, so that it is imported only when there are event files to read
    try:
        return importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    except ModuleNotFoundError as error:
        rule = "event files need tensorboard: pip install 'paceline[tensorboard]'"
        raise ConfigError("PATH", str(folder), rule) from error


def merged(logs: Iterable[Log]) -> Log:
    """One log from several of the same run; what an earlier one says of a metric is kept."""
    result = Log()
    for log in logs:
        for step, metrics in log.metrics.items():
            present = result.metrics.setdefault(step, {})
            present.update({name: value for name, value in metrics.items() if name not in present})
        result.unix_s = {**log.unix_s, **result.unix_s}
        result.num_unread += log.num_unread
        result.num_torn_lines += log.num_torn_lines
        result.num_replaced += log.num_replaced
    return result


def finite(metrics: dict[str, float], name: str) -> float | None:
    """The metric when it is there and finite."""
    value = metrics.get(name, math.nan)
    return value if math.isfinite(value) else None
