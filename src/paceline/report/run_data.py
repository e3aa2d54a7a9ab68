"""Everything a run's folder holds, read once. Missing or damaged files become notes, not failures.

A report is wanted most of a run that went wrong, so only a folder that is no run at all is an error.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from paceline.config.yaml_scalars import RecipeLoader
from paceline.diagnosis.run_records import first_steps
from paceline.report.words import Words
from paceline.telemetry.causes.records import RankCauses, read_causes
from paceline.telemetry.device.records import RankDevice, read_device_samples
from paceline.telemetry.metrics import MetricHistory, read_metric_history
from paceline.telemetry.records import (
    RankLedger,
    SectionRecord,
    ledger_files,
    read_ledger,
    read_rank_ledger,
)
from paceline.telemetry.run_process import read_process, run_status

_SOURCE_MEAN = re.compile(r"^reward/([^/]+)/mean$")


@dataclass(frozen=True, slots=True)
class SampleFile:
    """The rows of one samples/step{n}.jsonl."""

    step: int
    rows: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Note:
    """Something missing or unreadable: the key of a text with its values, or (`text`) a sentence of the records."""

    key: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""

    def say(self, words: Words) -> str:
        """The note as a sentence; one of the records stays as it was written."""
        return self.text or words(self.key, **self.values)


@dataclass(frozen=True, slots=True)
class RunData:
    """A run's records. `notes` say what was missing or unreadable.

    `config`, `environment` and `summary` are plain mappings: a run written by another version still has a report.
    """

    run_dir: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    ledgers: tuple[RankLedger, ...]
    history: MetricHistory
    samples: tuple[SampleFile, ...]
    notes: tuple[Note, ...] = field(default=())
    causes: tuple[RankCauses, ...] = ()
    devices: tuple[RankDevice, ...] = ()
    rank_steps: Mapping[int, list[SectionRecord]] = field(default_factory=dict)
    """Every rank's steps that count, as `RankLedger.steps` gives them."""
    detailed_steps: frozenset[int] | None = None
    """Steps of which every rank's spans were read; None: all. Sections are always all read."""

    def setting(self, name: str) -> Any:
        """A setting by its dotted name; None when config.yaml lacks it."""
        section, _, key = name.partition(".")
        content = self.config.get(section)
        return content.get(key) if isinstance(content, Mapping) else None

    @property
    def main_ledger(self) -> RankLedger | None:
        """The ledger that charts are drawn from: the lowest rank's."""
        return self.ledgers[0] if self.ledgers else None

    @property
    def steps(self) -> list[SectionRecord]:
        """The main ledger's steps; one done again after a resume counts once, as it was done last."""
        return self.rank_steps[self.main_ledger.rank] if self.main_ledger else []

    @property
    def timed_steps(self) -> list[SectionRecord]:
        """Those of `steps` that times are taken from, the same as a diagnosis takes: warm-up makes a step slower, and
        so does a profiler. All, where none is left."""
        return self.timed_of(self.steps)

    @property
    def untimed(self) -> frozenset[int]:
        """Numbers of the steps that no mean time or rate is taken from."""
        left_out = self.warmup | {step for step, value in self.series("profiled") if value > 0}
        all_steps = {step.step for step in self.steps if step.step is not None}
        return frozenset() if all_steps <= left_out else frozenset(all_steps & left_out)

    @property
    def warmup(self) -> frozenset[int]:
        """Numbers of the first steps of every process."""
        return frozenset(first_steps(self.ledgers, self.summary.get("status") == "imported"))

    def timed_of(self, steps: Sequence[SectionRecord]) -> list[SectionRecord]:
        """Those of a rank's steps that times are taken from."""
        untimed = self.untimed
        return [step for step in steps if step.step not in untimed]

    @property
    def reward_sources(self) -> list[str]:
        """Names of the reward's sources that have metrics of their own, in the order they appear."""
        names = dict.fromkeys(name for record in self.history.records for name in record.metrics)
        return [match.group(1) for name in names if (match := _SOURCE_MEAN.match(name))]

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) wherever the metric was recorded; values may be nan or infinite."""
        return [
            (record.step, record.metrics[metric])
            for record in self.history.records
            if metric in record.metrics
        ]


def load_run(run_dir: Path) -> RunData:
    """Reads a run's folder.

    Raises:
        FileNotFoundError: there is no such folder, or it holds neither a config nor a record of a run.
        ValueError: a record is of a version this paceline does not read.
    """
    run_dir = Path(run_dir)
    _check_is_run(run_dir)
    notes: list[Note] = []
    summary = _with_standing(_read_json(run_dir / "summary.json", notes), run_dir)
    notes += [Note(text=str(note)) for note in summary.get("notes", ())]  # what an importer could not know
    ledgers, detailed = _read_ledgers(run_dir)
    return RunData(
        run_dir=run_dir,
        config=_read_config(run_dir / "config.yaml", notes),
        environment=_read_json(run_dir / "env.json", notes),
        summary=summary,
        ledgers=ledgers,
        history=read_metric_history(run_dir),
        samples=_first_and_last_samples(run_dir / "samples", notes),
        notes=tuple(notes),
        causes=read_causes(run_dir),
        devices=read_device_samples(run_dir),
        rank_steps={ledger.rank: ledger.steps() for ledger in ledgers},
        detailed_steps=detailed,
    )


_MAX_DETAILED = 2048
"""Steps times ranks whose spans are read one by one; of more, evenly spaced steps."""


def _read_ledgers(run_dir: Path) -> tuple[tuple[RankLedger, ...], frozenset[int] | None]:
    files = ledger_files(run_dir)
    if not files:
        return (), None
    main = read_rank_ledger(files[0])
    steps = main.steps()
    if len(files) * len(steps) <= _MAX_DETAILED:
        return read_ledger(run_dir), None
    stride = -(-len(files) * len(steps) // _MAX_DETAILED)
    by_time = sorted(steps, key=lambda step: step.wall_s)
    chosen = [*steps[::stride], steps[-1], by_time[len(by_time) // 2], by_time[-1]]
    detailed = frozenset(step.step for step in chosen if step.step is not None)
    return (main, *read_ledger(run_dir, detailed)[1:]), detailed


def _check_is_run(run_dir: Path) -> None:
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir}: there is no such folder")
    if not any((run_dir / name).exists() for name in ("config.yaml", "metrics.jsonl", "ledger")):
        raise FileNotFoundError(
            f"{run_dir}: not a run's folder; it holds none of config.yaml, metrics.jsonl, ledger/"
        )


def _read_config(path: Path, notes: list[Note]) -> Mapping[str, Any]:
    if not path.exists():
        notes.append(Note("note.no-config"))
        return {}
    content = yaml.load(path.read_text(encoding="utf-8"), Loader=RecipeLoader)
    return content if isinstance(content, Mapping) else {}


def _read_json(path: Path, notes: list[Note]) -> Mapping[str, Any]:
    if not path.exists():
        notes.append(Note("note.missing", {"name": path.name}))
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        notes.append(Note("note.unreadable", {"name": path.name, "error": error}))
        return {}
    return content if isinstance(content, Mapping) else {}


def _with_standing(summary: Mapping[str, Any], run_dir: Path) -> Mapping[str, Any]:
    """The summary, with what its run's process tells where it is silent or out of date."""
    process = read_process(run_dir)
    if process is None:
        return summary
    written = str(summary.get("status", ""))
    status = run_status(written, process)
    if status == written:
        return summary
    return {**summary, "status": status, "message": process.message}


def _first_and_last_samples(folder: Path, notes: list[Note]) -> tuple[SampleFile, ...]:
    by_step = {
        int(number): path
        for path in folder.glob("step*.jsonl")
        if (number := path.stem.removeprefix("step")).isdigit()
    }
    wanted = dict.fromkeys((min(by_step), max(by_step))) if by_step else {}
    files = (_read_samples(step, by_step[step], notes) for step in wanted)
    return tuple(file for file in files if file.rows)


def _read_samples(step: int, path: Path, notes: list[Note]) -> SampleFile:
    rows, num_torn = [], 0
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            num_torn += 1
    if num_torn:
        notes.append(Note("note.torn-samples", {"name": path.name, "count": num_torn}))
    return SampleFile(step, tuple(rows))
