"""Runs to explain, on the real ledger under a clock that moves when told to, and their figures worked out anew from the
raw lines of their files."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import yaml

from paceline.lab.student_t import critical_value
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricLog

CAUSES = ("compute", "memory", "communication", "scheduling", "queue", "data")


class Clock:
    """Nanoseconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1_000_000

    def __call__(self) -> int:
        return self.now

    def wait(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += round(seconds * 1e9)


@dataclass
class PlannedRun:
    """A run of planned times. `stages`: seconds by stage and cause ("" for none); rank r takes `slower[r]` times as
    long in update_actor and trains on `tokens[r]`; ranks wait for the slowest."""

    run_dir: Path
    stages: dict[tuple[str, str], float] = field(
        default_factory=lambda: {
            ("data", "data"): 0.11,
            ("rollout", ""): 1.7,
            ("reward", "queue"): 0.34,
            ("ref_logprob", ""): 0.42,
            ("update_actor", ""): 2.3,
            ("sync", "communication"): 0.21,
            ("checkpoint", "queue"): 0.17,
        }
    )
    slower: tuple[float, ...] = (1.0,)
    tokens: tuple[int, ...] = (1000,)
    num_steps: int = 8
    noise: float = 0.02
    seed: int = 0
    gap_s: float = 0.013
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def write(self) -> Path:
        """Steps 1 to n with a resume after two thirds that does one step again."""
        self.run_dir.mkdir(parents=True)
        config = {"run": {"name": self.run_dir.name, "num_steps": self.num_steps}, **self.settings}
        (self.run_dir / "config.yaml").write_text(yaml.safe_dump(config))
        (self.run_dir / "summary.json").write_text(json.dumps({"v": 1, "status": "completed"}))
        (self.run_dir / "env.json").write_text(json.dumps({"v": 1, "device": "cpu"}))
        cut = self.num_steps * 2 // 3
        self._process(1, cut)
        self._process(cut, self.num_steps)
        return self.run_dir

    def _process(self, first: int, last: int) -> None:
        for rank, factor in enumerate(self.slower):
            clock = Clock()
            ledger = Ledger(self.run_dir / "ledger" / f"rank{rank}.jsonl", rank, clock_ns=clock)
            for step in range(first, last + 1):
                self._step(ledger, clock, rank, factor, step)
            ledger.close()
        with MetricLog(self.run_dir) as log:
            for step in range(first, last + 1):
                log.record(step, {"reward/mean": 0.5, **self.metrics})

    def _step(self, ledger: Ledger, clock: Clock, rank: int, factor: float, step: int) -> None:
        with ledger.step(step):
            for (stage, cause), seconds in self.stages.items():
                pace = random.Random(f"{self.seed}/{step}/{stage}/{cause}").uniform(
                    1 - self.noise, 1 + self.noise
                )
                own = seconds * pace * (factor if stage == "update_actor" else 1.0)
                tokens = self.tokens[rank] if stage == "update_actor" else 0
                with ledger.span(stage, cause=cause or None, tokens=tokens):
                    clock.wait(own)
                if stage == "update_actor" and (slowest := max(self.slower)) > factor:
                    with ledger.span("idle", "for the others", cause="queue"):
                        clock.wait(seconds * pace * (slowest - factor))
            clock.wait(self.gap_s)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass
class RawRun:
    """A run's figures from its files' lines, without paceline's readers."""

    run_dir: Path

    def __post_init__(self) -> None:
        self.steps: dict[int, dict[int, dict[str, Any]]] = {}
        self.firsts: set[int] = set()
        for path in sorted((self.run_dir / "ledger").glob("*.jsonl")):
            self._read(int(path.stem[4:]), path)
        status = json.loads((self.run_dir / "summary.json").read_text())["status"]
        self.cells: dict[int, list[dict[str, Any]]] = {}
        for path in (self.run_dir / "causes").glob("*.jsonl"):
            for line in lines(path):
                if line["kind"] == "cells":
                    self.cells.setdefault(line["step"], []).append(line)
        common = sorted(set.intersection(*map(set, self.steps.values())))
        self.is_imported = status == "imported"
        warmup = {1} if self.is_imported else self.firsts
        left_out = warmup | (set() if self.is_imported else set(self.cells))
        self.counted = [step for step in common if step not in left_out] or common
        self.num_profiled = len([step for step in common if step in self.cells and step not in self.counted])
        self.num_warmup = len(warmup & set(common)) if set(common) - left_out else 0

    def _read(self, rank: int, path: Path) -> None:
        kept = self.steps.setdefault(rank, {})
        is_first = False
        for line in lines(path):
            if line["kind"] == "run":
                is_first = True
            elif line["kind"] == "section" and line["step"] is not None:
                for later in [step for step in kept if step >= line["step"]]:
                    del kept[later]
                kept[line["step"]] = line
                if is_first:
                    self.firsts.add(line["step"])
                is_first = False

    def per_step(self, figure: Any) -> dict[int, float]:
        return {step: fmean(figure(steps[step]) for steps in self.steps.values()) for step in self.counted}

    def mean(self, figure: Any) -> float:
        return fmean(self.per_step(figure).values())

    def stages(self) -> list[str]:
        return sorted(
            {name for steps in self.steps.values() for step in self.counted for name in steps[step]["stages"]}
        )

    def figures(self) -> dict[str, float]:
        """Every figure that an explanation of this run may hold."""
        step_s = self.mean(lambda one: one["wall_s"])
        stage_s = {name: self.mean(lambda one, name=name: self_s(one, name)) for name in self.stages()}
        stage_s.setdefault("idle", 0.0)
        unaccounted = self.mean(lambda one: one["unaccounted_s"])
        small = [v for name, v in stage_s.items() if v < 0.01 * step_s and name != "update_actor"]
        found = {
            "step_s": step_s,
            "num_steps": len(self.counted),
            "num_ranks": len(self.steps),
            "num_warmup": self.num_warmup,
            "num_profiled": self.num_profiled,
            "unaccounted_s": unaccounted,
            "unaccounted_share": unaccounted / step_s,
            "small_share": sum(small) / step_s,
            "retries": self.retries(),
        }
        found |= {f"stage_s/{name}": value for name, value in stage_s.items()}
        found |= {f"stage_share/{name}": value / step_s for name, value in stage_s.items()}
        return found | self.balance() | self.causes(stage_s)

    def balance(self) -> dict[str, float]:
        tokens = {
            rank: sum(
                steps[step]["stages"].get("update_actor", {"tokens": 0})["tokens"] for step in self.counted
            )
            for rank, steps in self.steps.items()
        }
        busy = {
            rank: sum(steps[step]["wall_s"] - self_s(steps[step], "idle") for step in self.counted)
            for rank, steps in self.steps.items()
        }
        found = {}
        for name, values in (("tokens", tokens), ("busy", busy)):
            largest = max(values, key=lambda rank: values[rank])
            found[f"{name}_max_rank"] = largest
            if total := sum(values.values()):
                found[f"{name}_max_over_mean"] = values[largest] * len(values) / total
        return found

    def causes(self, stage_s: dict[str, float]) -> dict[str, float]:
        if not self.cells:
            return {
                f"cause_s/{cause}": self.mean(lambda one, cause=cause: cause_s(one, cause))
                for cause in ("communication", "data", "queue")
            }
        found = dict.fromkeys(CAUSES, 0.0)
        update = 0.0
        for name, seconds in stage_s.items():
            cells = [cell for step in self.cells.values() for cell in step if cell["stage"] == name]
            total = sum(cell[f"{cause}_s"] for cell in cells for cause in CAUSES)
            for cause in CAUSES if total else ():
                part = sum(cell[f"{cause}_s"] for cell in cells) / total * seconds
                found[cause] += part if name != "checkpoint" else 0.0
                update += part if (name, cause) == ("update_actor", "compute") else 0.0
        named = {f"cause_s/{cause}": value for cause, value in found.items()}
        covered = sum(found.values()) + stage_s.get("checkpoint", 0.0)
        left = self.mean(lambda one: one["wall_s"] - one["unaccounted_s"]) - covered
        return named | {
            "uncovered_s": left,
            "update_compute_s": update,
            "work_s": found["compute"] + found["memory"],
        }

    def retries(self) -> float:
        kept: dict[int, dict[str, float]] = {}
        for line in lines(self.run_dir / "metrics.jsonl"):
            for later in [step for step in kept if step >= line["step"]]:
                del kept[later]
            kept[line["step"]] = line["metrics"]
        return sum(v for values in kept.values() for name, v in values.items() if name.endswith("retries"))


def self_s(section: dict[str, Any], stage: str) -> float:
    return section["stages"].get(stage, {"self_s": 0.0})["self_s"]


def cause_s(section: dict[str, Any], cause: str, apart: tuple[str, ...] = ("checkpoint",)) -> float:
    stages = section["stages"].items()
    return sum(stage.get("cause_s", {}).get(cause, 0.0) for name, stage in stages if name not in apart)


def paired_figures(run: RawRun, other: RawRun) -> dict[str, float]:
    """Every figure that a comparison of the two may hold besides."""
    pairs = sorted(set(run.counted) & set(other.counted))
    found: dict[str, float] = {"num_pairs": len(pairs)}

    def series(one: RawRun, figure: Any) -> list[float]:
        values = one.per_step(figure)
        return [values[step] for step in pairs]

    def change(key: str, figure: Any) -> tuple[float, float]:
        differences = [a - b for a, b in zip(series(run, figure), series(other, figure), strict=True)]
        found[key] = abs(fmean(differences))
        half = critical_value(0.05, len(pairs) - 1) * stdev(differences) / len(pairs) ** 0.5
        return fmean(differences) - half, fmean(differences) + half

    found["paired_step_s"] = fmean(series(run, lambda one: one["wall_s"]))
    found["other_step_s"] = fmean(series(other, lambda one: one["wall_s"]))
    low, high = change("change/step", lambda one: one["wall_s"])
    is_clear = low > 0 or high < 0
    found["change_low/step"], found["change_high/step"] = (
        sorted((abs(low), abs(high))) if is_clear else (low, high)
    )
    for name in {*run.stages(), *other.stages(), "idle", "checkpoint"}:
        change(f"change/{name}", lambda one, name=name: self_s(one, name))
        change(f"wait_change/{name}", lambda one, name=name: self_s(one, name))
    apart = ("checkpoint", "idle")  # told by themselves
    for cause in ("communication", "data", "queue"):
        change(f"wait_change/{cause}", lambda one, cause=cause: cause_s(one, cause, apart))
    flat = [flat_config(yaml.safe_load((one.run_dir / "config.yaml").read_text())) for one in (run, other)]
    differing = [key for key in flat[0].keys() | flat[1].keys() if flat[0].get(key) != flat[1].get(key)]
    found["more_settings"] = len([key for key in differing if key != "run.name"]) - 5
    return found


def flat_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{section}.{key}": value for section, content in config.items() for key, value in content.items()
    }
