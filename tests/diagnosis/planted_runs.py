"""Small real runs, and a clock that measures what was planted in them without looking at their records."""

import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny_sections

from paceline.config import load_config
from paceline.schedules import run_training
from paceline.schedules.recorder import Recorder

NUM_STEPS = 5
FIRST_STEPS = 1
"""Warm-up: what a diagnosis leaves out is left out of what was planted, too."""

BASE: dict[str, dict[str, Any]] = {
    "run": {"num_steps": NUM_STEPS, "save_samples_every": 0},
    "task": {"eval_size": 0},
    "batch": {"num_prompts": 12, "num_samples": 8, "token_budget": 4096},
    "rollout": {"max_new_tokens": 24},
    "checkpoint": {"save_final": False},
}


class Clock:
    """Seconds by step of a run, as the test itself measures them."""

    def __init__(self) -> None:
        self.step = 0
        self.seconds: dict[int, float] = defaultdict(float)

    def nap(self, seconds: float) -> None:
        """Sleeps, and counts how long it really was."""
        with self:
            time.sleep(seconds)

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.step] += time.perf_counter() - self._began

    def per_step(self) -> float:
        """Mean over the steps that a diagnosis looks at."""
        return sum(self.seconds[step] for step in range(FIRST_STEPS + 1, NUM_STEPS + 1)) / (
            NUM_STEPS - FIRST_STEPS
        )

    def follow(self, monkeypatch: pytest.MonkeyPatch) -> "Clock":
        """Lets the run say which step is under way."""
        begin = Recorder.begin

        def begun(recorder: Recorder, step: int) -> None:
            self.step = step
            begin(recorder, step)

        monkeypatch.setattr(Recorder, "begin", begun)
        return self

    def around(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> "Clock":
        """Measures every call of a function or method."""
        wrap(monkeypatch, owner, name, lambda call: self._timed(call))
        return self

    def _timed(self, call: Callable[[], Any]) -> Any:
        with self:
            return call()


def wrap(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, around: Callable[[Callable[[], Any]], Any]
) -> None:
    """Replaces `owner.name` by `around(call)`, where `call()` is the original with its arguments."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: around(lambda: original(*args, **kwargs)))


def train(folder: Path, name: str, **changes: dict[str, Any]) -> Path:
    """Trains the base run with changes; returns its folder."""
    sections = {section: dict(values) for section, values in BASE.items()}
    for section, values in {**changes, "run": {"name": name, **changes.get("run", {})}}.items():
        sections[section] = {**sections.get(section, {}), **values}
    config = load_config(None, sections=tiny_sections(folder, **sections))
    return run_training(config).run_dir


def write_uneven_prompts(path: Path, count: int, longest: int) -> Path:
    """Prompts of 1 to `longest` words."""
    rows = [
        {"prompt": " ".join(f"w{(index + word) % 90}" for word in range(1 + index % longest)), "answer": "w1"}
        for index in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
