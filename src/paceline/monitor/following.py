"""What is known of a run while it goes on: metrics by step, each rank's last steps, and how the run stands."""

import json
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from paceline.config.errors import ConfigError
from paceline.config.yaml_scalars import RecipeLoader
from paceline.monitor.tailing import JsonlTail
from paceline.telemetry.jsonl import decode_number
from paceline.telemetry.metrics import METRICS_FILE, MetricRecord
from paceline.telemetry.metrics import RECORD_VERSION as METRICS_VERSION
from paceline.telemetry.run_process import RunProcess, read_process, run_status
from paceline.telemetry.sections import RECORD_VERSION as LEDGER_VERSION

RECENT_STEPS = 32
"""Steps of each rank that are kept: enough for a mean that is not one step's luck."""

ENDED = ("completed", "stopped", "failed", "imported", "refused", "died")
"""States after which nothing more is written."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One rank's step: seconds by stage (self-times, `unaccounted` apart), tokens by stage, peaks in bytes."""

    step: int
    wall_s: float
    unaccounted_s: float
    stage_s: Mapping[str, float]
    stage_tokens: Mapping[str, int]
    peak_allocated: int
    peak_reserved: int
    host_rss: int


@dataclass(slots=True)
class RankTotals:
    """Sums over all that a rank's file holds, steps done again after a resume included: work done, not progress."""

    num_steps: int = 0
    wall_s: float = 0.0
    unaccounted_s: float = 0.0
    stage_s: dict[str, float] = field(default_factory=dict)
    stage_tokens: dict[str, int] = field(default_factory=dict)
    stage_flops: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class RankProgress:
    """A rank's recent steps in order, its sums, and the Unix time its newest process began."""

    rank: int
    recent: deque[StepTimes] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    totals: RankTotals = field(default_factory=RankTotals)
    started_unix_s: float = 0.0
    num_torn_lines: int = 0


class RunFollower:
    """Follows one run's folder; `poll` reads what is new. Files may be missing, torn, rotated, or resumed into."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = Path(run_dir)
        self.records: list[MetricRecord] = []
        """Metrics of the steps that count, in order."""
        self.metric_totals: dict[str, float] = {}
        """Sums over every record in the file, steps done again included."""
        self.ranks: dict[int, RankProgress] = {}
        self.summary: Mapping[str, Any] = {}
        self.config: Mapping[str, Any] = {}
        self.num_torn_lines = 0
        self._metrics = JsonlTail(self.run_dir / METRICS_FILE)
        self._ledgers: dict[int, JsonlTail] = {}
        self._stamps: dict[str, tuple[int, int]] = {}
        self._summary_unix_s = 0.0
        self._last_growth_unix_s = 0.0

    def poll(self) -> bool:
        """Reads what was added since the last call; whether anything was.

        Raises:
            ValueError: a record is of a version that this paceline does not read.
        """
        heads = [self._read_config(), self._read_summary()]
        grew = [self._poll_metrics(), *(self._poll_rank(rank) for rank in self._find_ranks())]
        return any(heads) or any(grew)

    @property
    def name(self) -> str:
        """The run's name; its folder's where no config says one."""
        return str(_section(self.config, "run").get("name") or self.run_dir.resolve().name)

    @property
    def num_steps_planned(self) -> int | None:
        """Steps the run is to make; None where that is not known."""
        planned = _section(self.config, "run").get("num_steps", self.summary.get("num_steps"))
        return planned if isinstance(planned, int) else None

    @property
    def status(self) -> str:
        """`starting`, `running`, or one of `ENDED`; see `run_status`.

        A process that has begun after summary.json was last written is starting, whatever an earlier one wrote there.
        """
        written = str(self.summary.get("status", ""))
        newest = max((rank.started_unix_s for rank in self.ranks.values()), default=0.0)
        begun_anew = newest > self._summary_unix_s and written != "imported"
        return run_status(written, self.process, begun_anew=begun_anew)

    @property
    def process(self) -> RunProcess | None:
        """The newest process that writes the run, where process.json tells."""
        return read_process(self.run_dir)

    @property
    def message(self) -> str:
        """Why the run failed or was refused; empty where nothing was said."""
        told = self.process.message if self.process is not None else ""
        return told if self.status == "refused" else str(self.summary.get("message") or told)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is to be expected, unless somebody resumes the run."""
        return self.status in ENDED

    @property
    def last_growth_unix_s(self) -> float:
        """When a record was last added, as the files' own times say; 0 when there is none."""
        return self._last_growth_unix_s

    def silent_for_s(self) -> float:
        """Seconds since a record was last added."""
        return max(0.0, time.time() - self._last_growth_unix_s) if self._last_growth_unix_s else 0.0

    def _poll_metrics(self) -> bool:
        new = self._metrics.read()
        if new.was_replaced:
            self.metric_totals = {}
        self.num_torn_lines += new.num_torn
        for raw in new.records:
            _check_version(raw, METRICS_VERSION, self._metrics.path)
            values = {name: decode_number(value) for name, value in raw["metrics"].items()}
            record = MetricRecord(raw["step"], raw["time"], values)
            while self.records and self.records[-1].step >= record.step:
                self.records.pop()  # a resumed run has gone back behind it
            self.records.append(record)
            for name, value in values.items():
                self.metric_totals[name] = self.metric_totals.get(name, 0.0) + value
        return self._grew(self._metrics.path, bool(new.records))

    def _find_ranks(self) -> list[int]:
        for path in (self.run_dir / "ledger").glob("rank*.jsonl"):
            number = path.stem.removeprefix("rank")
            if number.isdigit() and int(number) not in self._ledgers:
                self._ledgers[int(number)] = JsonlTail(path, skip=b'"kind": "span"')
                self.ranks[int(number)] = RankProgress(int(number))
        self.ranks = dict(sorted(self.ranks.items()))
        return sorted(self._ledgers)

    def _poll_rank(self, number: int) -> bool:
        tail, rank = self._ledgers[number], self.ranks[number]
        new = tail.read()
        if new.was_replaced:
            rank.totals = RankTotals()
        rank.num_torn_lines += new.num_torn
        for raw in new.records:
            _check_version(raw, LEDGER_VERSION, tail.path)
            if raw["kind"] == "run":
                rank.started_unix_s = raw["unix_s"]
            elif raw["kind"] == "section":
                _take_section(rank, raw)
        return self._grew(tail.path, bool(new.records))

    def _grew(self, path: Path, has_records: bool) -> bool:
        if has_records:
            self._last_growth_unix_s = max(self._last_growth_unix_s, path.stat().st_mtime)
        return has_records

    def _read_summary(self) -> bool:
        path = self.run_dir / "summary.json"
        if not self._has_changed(path):
            return False
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            return False  # a copy under way; the next poll sees the whole
        self.summary = content if isinstance(content, Mapping) else {}
        self._summary_unix_s = path.stat().st_mtime
        return True

    def _read_config(self) -> bool:
        path = self.run_dir / "config.yaml"
        if not self._has_changed(path):
            return False
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=RecipeLoader)
        self.config = content if isinstance(content, Mapping) else {}
        return True

    def _has_changed(self, path: Path) -> bool:
        if not path.exists():
            return False
        status = path.stat()
        stamp = (status.st_mtime_ns, status.st_ino)
        if self._stamps.get(path.name) == stamp:
            return False
        self._stamps[path.name] = stamp
        return True


def follow(run_dir: Path) -> RunFollower:
    """A follower of `run_dir` that has read what there is.

    Raises:
        ConfigError: `run_dir` is not the folder of a run.
    """
    names = ("config.yaml", METRICS_FILE, "ledger")
    if not run_dir.is_dir():
        raise ConfigError("run", str(run_dir), "there is no such folder", zh="没有这个文件夹")
    if not any((run_dir / name).exists() for name in names):
        wanted = ", ".join(names)
        rule, zh = (
            f"must be the folder of a run; it holds none of {wanted}",
            f"须是训练运行的文件夹，而其中没有 {wanted}",
        )
        raise ConfigError("run", str(run_dir), rule, zh=zh)
    follower = RunFollower(run_dir)
    follower.poll()
    return follower


def _take_section(rank: RankProgress, raw: Mapping[str, Any]) -> None:
    """Adds a step to a rank's recent ones and its sums; time outside steps is no step's."""
    if raw["step"] is None:
        return
    stages: Mapping[str, Mapping[str, Any]] = raw["stages"]
    step = StepTimes(
        step=raw["step"],
        wall_s=raw["wall_s"],
        unaccounted_s=raw["unaccounted_s"],
        stage_s={name: stage["self_s"] for name, stage in stages.items()},
        stage_tokens={name: stage["tokens"] for name, stage in stages.items()},
        peak_allocated=raw["peak_allocated"],
        peak_reserved=raw["peak_reserved"],
        host_rss=raw["host_rss"],
    )
    while rank.recent and rank.recent[-1].step >= step.step:
        rank.recent.pop()
    rank.recent.append(step)
    totals = rank.totals
    totals.num_steps += 1
    totals.wall_s += step.wall_s
    totals.unaccounted_s += step.unaccounted_s
    for name, stage in stages.items():
        totals.stage_s[name] = totals.stage_s.get(name, 0.0) + stage["self_s"]
        totals.stage_tokens[name] = totals.stage_tokens.get(name, 0) + stage["tokens"]
        totals.stage_flops[name] = totals.stage_flops.get(name, 0.0) + stage["flops"]


def _check_version(raw: Mapping[str, Any], version: int, path: Path) -> None:
    if raw["v"] != version:
        raise ValueError(f"{path}: a record of version {raw['v']}; this paceline reads version {version}")


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}
