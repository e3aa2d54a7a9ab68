"""Metric sinks beside metrics.jsonl: TensorBoard and W&B, each behind an extra of the same name."""

import importlib
import importlib.util
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from paceline.config.errors import ConfigError

_KEY = "telemetry.sinks"
_MODULES = {"tensorboard": "tensorboard.summary", "wandb": "wandb"}


class MetricSink(Protocol):
    """A further place that metrics go to."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of one step."""
        ...

    def close(self) -> None:
        """Writes what is still held back."""
        ...


def check_sinks(names: Iterable[str]) -> None:
    """Refuses sinks whose package is not installed, without importing any.

    Raises:
        ConfigError: one problem per such sink, or per name that is no sink.
    """
    problems = [problem for name in names if (problem := _problem(name)) is not None]
    if problems:
        raise ConfigError.join(problems)


def open_sinks(
    names: Iterable[str], run_dir: Path, run_name: str, config: Mapping[str, Any]
) -> list[MetricSink]:
    """Opens every named sink below `run_dir`. `config` is shown beside the run where a sink has a place for it.

    Raises:
        ConfigError: as `check_sinks`, before any sink is opened.
    """
    names = list(dict.fromkeys(names))
    check_sinks(names)
    return [
        TensorBoardSink(run_dir) if name == "tensorboard" else WandbSink(run_dir, run_name, config)
        for name in names
    ]


class TensorBoardSink:
    """Scalars as event files in `tensorboard/`. A resumed run adds a file; TensorBoard reads all of them."""

    def __init__(self, run_dir: Path) -> None:
        self._writer = _load("tensorboard").Writer(str(run_dir / "tensorboard"))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one scalar per metric and flushes."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Ends the event file."""
        self._writer.close()


class WandbSink:
    """A W&B run in `wandb/`. Offline (`wandb sync` uploads it later) unless WANDB_MODE says otherwise."""

    def __init__(self, run_dir: Path, run_name: str, config: Mapping[str, Any]) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run = _load("wandb").init(
            project="paceline",
            name=run_name,
            dir=str(run_dir),
            config=dict(config),
            mode=os.environ.get("WANDB_MODE", "offline"),
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs all metrics of the step in one call."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Ends the run; waits for what is not yet written."""
        self._run.finish()


def _problem(name: str) -> ConfigError | None:
    if name not in _MODULES:
        return ConfigError(_KEY, name, f"must be one of {', '.join(_MODULES)}")
    if importlib.util.find_spec(name) is None:
        return _missing(name)
    return None


def _missing(name: str) -> ConfigError:
    return ConfigError(_KEY, name, f"the package {name} is not installed", f"pip install 'paceline[{name}]'")


def _load(name: str) -> Any:
    """Imports a sink's package here and not at the top: it is optional, slow to import, and absent in most runs.

    Raises:
        ConfigError: it is not there, or fails to import for want of a package of its own.
    """
    try:
        return importlib.import_module(_MODULES[name])
    except ImportError as error:
        raise _missing(name) from error
