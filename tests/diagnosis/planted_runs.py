"""Small real runs, and a clock that measures what was planted in them without looking at their records."""

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import tiny_sections

from paceline.config import Config, dump_config, load_config
from paceline.engine.memory_shortage import TokenBudget
from paceline.engine.trainer import TrainEngine
from paceline.rollout.native.paged import PagedEngine
from paceline.schedules import run_training
from paceline.schedules.recorder import Recorder
from paceline.telemetry.ledger import Ledger

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
    """Seconds by step of a run, as the test itself measures them. `sleep` is how a nap lets time pass."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self.step = 0
        self.seconds: dict[int, float] = defaultdict(float)
        self._sleep = sleep

    def nap(self, seconds: float) -> None:
        """Sleeps, and counts how long it really was."""
        with self:
            self._sleep(seconds)  # the planted slow-down; what it really took is what counts

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
        original = getattr(owner, name)

        def measured(*args: Any, **kwargs: Any) -> Any:
            with self:
                return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, measured)
        return self


def update_and_shadow(monkeypatch: pytest.MonkeyPatch, **batch: Any) -> tuple[Clock, Clock]:
    """Clocks of a run's updates, and of the same samples' passes with other batch settings.

    The second pass follows right after the step and outside its record, so that both are measured under the same load.
    """
    clock = Clock().follow(monkeypatch).around(monkeypatch, TrainEngine, "update")
    shadow = Clock()
    timed_update, end = TrainEngine.update, Recorder.end
    last: list[tuple[TrainEngine, Any]] = []

    def update(trainer: TrainEngine, samples: Any, *args: Any) -> Any:
        last[:] = [(trainer, samples)]
        return timed_update(trainer, samples, *args)

    def ended(recorder: Recorder, step: int) -> None:
        end(recorder, step)
        shadow.step = step
        trainer, samples = last[0]
        engine = trainer.engine
        own = engine._batch, engine.budget
        engine._batch = engine._batch.model_copy(update=batch)
        engine.budget = TokenBudget(engine._batch.token_budget)
        with shadow:
            trainer.accumulate(samples)
        trainer.optimizer.zero_grad()
        engine._batch, engine.budget = own

    monkeypatch.setattr(TrainEngine, "update", update)
    monkeypatch.setattr(Recorder, "end", ended)
    return clock, shadow


def rollout_and_shadow(monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, Clock]:
    """Clocks of a run's rollouts, and of the same requests in an engine whose cache has no bound, after each step."""
    clock, roomy = Clock().follow(monkeypatch), Clock()
    generate, end = PagedEngine.generate, Recorder.end
    last: list[tuple[PagedEngine, Any, Any]] = []
    others: list[PagedEngine] = []

    def generated(engine: PagedEngine, requests: Any, params: Any, *args: Any) -> Any:
        if engine in others:
            return generate(engine, requests, params, *args)
        last[:] = [(engine, requests, params)]
        with clock:
            return generate(engine, requests, params, *args)

    def ended(recorder: Recorder, step: int) -> None:
        end(recorder, step)
        roomy.step = step
        engine, requests, params = last[0]
        if not others:
            limits = replace(engine._limits, max_cache_bytes=None)
            others.append(PagedEngine(engine._model, engine._tokenizer, limits, Ledger()))
        with roomy:
            others[0].generate(requests, params)

    monkeypatch.setattr(PagedEngine, "generate", generated)
    monkeypatch.setattr(Recorder, "end", ended)
    return clock, roomy


def configure(folder: Path, name: str, **changes: dict[str, Any]) -> Config:
    """The base run with changes."""
    sections = {section: dict(values) for section, values in BASE.items()}
    for section, values in {**changes, "run": {"name": name, **changes.get("run", {})}}.items():
        sections[section] = {**sections.get(section, {}), **values}
    return load_config(None, sections=tiny_sections(folder, **sections))


def train(folder: Path, name: str, **changes: dict[str, Any]) -> Path:
    """Trains the base run with changes; returns its folder."""
    return run_training(configure(folder, name, **changes)).run_dir


def write_recipe(folder: Path, name: str, **changes: dict[str, Any]) -> Path:
    """The base run with changes, for other processes."""
    path = folder / f"{name}.yaml"
    path.write_text(dump_config(configure(folder, name, **changes)))
    return path


def write_prompts(path: Path, count: int, lengths: Sequence[int]) -> Path:
    """Prompts of so many words, in turn."""
    rows = [
        {
            "prompt": " ".join(f"w{(index + word) % 90}" for word in range(lengths[index % len(lengths)])),
            "answer": "w1",
        }
        for index in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
