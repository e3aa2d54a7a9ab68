"""What a run's instruments cost a step, in processor time: the profiler of a profiled step, and the ledger's spans.

usage: python benchmarks/instrument_cost.py RECIPE [section.key=value ...] [--pairs N] [--json]

One run on one CPU thread. Every fourth step runs under the profiler, every other fourth one without any span, and each
of those is set against the mean of the two ordinary steps beside it; give the recipe samples of one length
(rollout.ignore_eos=true), so that steps do the same work. The processor time of the process is taken and not the clock:
what else the machine does then counts little. Ratios are geometric means over pairs with Student's 95 % interval.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paceline.config import load_config
from paceline.lab.student_t import critical_value
from paceline.schedules import run_training
from paceline.telemetry.causes.step_profiler import StepProfiler
from paceline.telemetry.ledger import Ledger

_CYCLE = 4
"""Steps 2, 6, 10 ... have no spans, steps 4, 8, 12 ... are profiled."""


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
    seconds, between = measure(options.recipe, options.overrides, _CYCLE * options.pairs + 1)
    found = {
        "profiled_step": ratio(seconds, 0, inverse=False),
        "spans": ratio(seconds, 2, inverse=True),
        "profiler_between_steps_s": statistics.median(between.values()),
        "ordinary_step_s": statistics.median(s for step, s in seconds.items() if step % 2 and step > 1),
        "num_pairs": options.pairs,
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


def measure(recipe: str, overrides: list[str], num_steps: int) -> tuple[dict[int, float], dict[int, float]]:
    """Processor seconds inside every step, and between steps for the profiler of those that were profiled."""
    seconds: dict[int, float] = {}
    between: dict[int, float] = {}
    without_spans = False
    profiled_step, open_span = StepProfiler.step, Ledger.span

    @contextmanager
    def timed_step(self: StepProfiler, step: int) -> Iterator[None]:
        nonlocal without_spans
        began = time.process_time()
        with profiled_step(self, step):
            without_spans = step % _CYCLE == 2
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
        *("cluster.device=cpu", "cluster.num_threads=1", f"telemetry.profile_every={_CYCLE}"),
        *("run.eval_every=0", "task.eval_size=0", "checkpoint.every=0", "checkpoint.save_final=false"),
        *("telemetry.live=off", "batch.skip_zero_advantage=false", f"run.num_steps={num_steps}"),
    ]
    run_training(load_config(recipe, [*settings, *overrides]))
    return seconds, between


def ratio(seconds: dict[int, float], remainder: int, *, inverse: bool) -> tuple[float, float, float]:
    """Geometric mean of these steps' time over that of the ordinary ones beside them (`inverse`: the other way round)
    with its interval."""
    steps = [step for step in seconds if step % _CYCLE == remainder and step + 1 in seconds and step > 2]
    logs = [
        math.log(seconds[step] / statistics.fmean((seconds[step - 1], seconds[step + 1]))) for step in steps
    ]
    mean = statistics.fmean(logs) * (-1.0 if inverse else 1.0)
    half = critical_value(0.05, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


if __name__ == "__main__":
    main()
