"""What a run's instruments cost a step, in processor time: the profiler of a profiled step, and the ledger's spans.

usage: python benchmarks/instrument_cost.py RECIPE [section.key=value ...] [--pairs N] [--json]

Two runs on one CPU thread each. In the first every fourth step runs under the profiler and is set against the mean of
the step before it and the second one after it: the first one after it still pays for the trace that was read. In the
second every other step has no spans and stands against the mean of its neighbours. Give the recipe samples of one
length (rollout.ignore_eos=true), so that steps do the same work. The processor time of the process is taken and not the
clock: what else the machine does then counts little. Ratios are geometric means over pairs with Student's 95 %
interval.
"""

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.config import load_config
from paceline.lab.student_t import critical_value
from paceline.schedules import run_training
from paceline.telemetry.causes.step_profiler import StepProfiler
from paceline.telemetry.ledger import Ledger

_WARMUP = 2
_PROFILED_EVERY, _BARE_EVERY = 4, 2


class NoSpan:
    """Stands in for a span and takes no note of anything."""

    def __enter__(self) -> "NoSpan":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def add(self, **_: Any) -> None:
        """Forgets what is known of the work."""


def main() -> None:
    """Runs the recipe and prints both ratios."""
    parser = argparse.ArgumentParser(description="Processor time of the instruments.")
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json", action="store_true", help="one JSON line instead of text")
    options = parser.parse_args()
    pairs = options.pairs
    profiled, between = measure(options, "profiled", _PROFILED_EVERY * pairs + _WARMUP, _PROFILED_EVERY, 0)
    alternating, _ = measure(options, "bare", _BARE_EVERY * pairs + _WARMUP + 1, 0, _BARE_EVERY)
    found = {
        "profiled_step": ratio(profiled, _PROFILED_EVERY, after=2),
        "spans": ratio(alternating, _BARE_EVERY, after=1, inverse=True),
        "profiler_between_steps_s": statistics.median(between.values()),
        "ordinary_step_s": statistics.median(s for step, s in alternating.items() if step % _BARE_EVERY),
        "num_pairs": pairs,
    }
    if options.json:
        print(json.dumps(found))
        return
    for name, what in (("profiled_step", "a step under the profiler"), ("spans", "a step with its spans")):
        mean, low, high = found[name]
        other = "one without the profiler" if name == "profiled_step" else "one without spans"
        print(f"{what} over {other}: {mean:.4f} [{low:.4f}, {high:.4f}], {options.pairs} pairs")
    print(
        f"starting and reading the profiler: {found['profiler_between_steps_s']:.2f} s, "
        f"a step: {found['ordinary_step_s']:.2f} s of processor time"
    )


def measure(
    options: argparse.Namespace, name: str, num_steps: int, profiled_every: int, bare_every: int
) -> tuple[dict[int, float], dict[int, float]]:
    """Processor seconds inside every step, and between steps for the profiler of those that were profiled. Each
    `bare_every`-th step (0: none) has no spans."""
    seconds: dict[int, float] = {}
    between: dict[int, float] = {}
    without_spans = False
    profiled_step, open_span = StepProfiler.step, Ledger.span

    @contextmanager
    def timed_step(self: StepProfiler, step: int) -> Iterator[None]:
        nonlocal without_spans
        began = time.process_time()
        with profiled_step(self, step):
            without_spans = bare_every > 0 and step % bare_every == 0
            started = time.process_time()
            yield
            seconds[step] = time.process_time() - started
            without_spans = False
        if self.is_due(step):
            between[step] = time.process_time() - began - seconds[step]

    def span(self: Ledger, *arguments: Any, **named: Any) -> Any:
        return NoSpan() if without_spans else open_span(self, *arguments, **named)

    StepProfiler.step, Ledger.span = timed_step, span  # type: ignore[method-assign, assignment]
    settings = [
        *("cluster.device=cpu", "cluster.num_threads=1", f"telemetry.profile_every={profiled_every}"),
        *("run.eval_every=0", "task.eval_size=0", "checkpoint.every=0", "checkpoint.save_final=false"),
        *("telemetry.live=off", "batch.skip_zero_advantage=false", f"run.num_steps={num_steps}"),
    ]
    name = f"instrument-cost-{name}"
    with tempfile.TemporaryDirectory() as folder:
        settings += [*options.overrides, f"run.dir={folder}", f"run.name={name}"]
        try:
            run_training(load_config(options.recipe, settings))
        finally:
            StepProfiler.step, Ledger.span = profiled_step, open_span  # type: ignore[method-assign]
    return seconds, between


def ratio(
    seconds: dict[int, float], every: int, *, after: int, inverse: bool = False
) -> tuple[float, float, float]:
    """Geometric mean of each `every`-th step's time over that of the step before it and of the one `after` it
    (`inverse`: the other way round) with its interval."""
    steps = [step for step in seconds if step % every == 0 and step > _WARMUP and step + after in seconds]
    logs = [
        math.log(seconds[step] / statistics.fmean((seconds[step - 1], seconds[step + after])))
        for step in steps
    ]
    mean = statistics.fmean(logs) * (-1.0 if inverse else 1.0)
    half = critical_value(0.05, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


if __name__ == "__main__":
    main()
