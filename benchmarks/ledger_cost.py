"""What the ledger itself costs: nanoseconds per span, and its share of a step.

usage: python benchmarks/ledger_cost.py [RUN] [--spans-per-step N --step-seconds S] [--json]

With RUN (a run's folder) spans and seconds of a step are that run's own medians on rank 0; without, those given. The
cost of a step is what its spans take to open and close, one look at host memory for each outermost span, and adding up
and writing the records; that happens between two steps, and is counted here all the same. On a machine that does other
work too, the quickest round is what the ledger costs, the median what it costs there and then: both are shown.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.telemetry.host_memory import host_rss
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.records import read_ledger

_ROUNDS = 9
_SPANS_PER_ROUND = 1_500  # below the ledger's bound on kept records, so that every span is also written


@dataclass(frozen=True, slots=True)
class Workload:
    """A step as the ledger sees it; `num_outer_spans` are those with no span around them, `step_s` its wall time."""

    num_spans: int
    num_outer_spans: int
    step_s: float


@dataclass(frozen=True, slots=True)
class LedgerCost:
    """A span opened and closed, one look at host memory, one span added up and its record written."""

    span_ns: float
    memory_sample_ns: float
    record_ns: float

    def share_of(self, workload: Workload) -> float:
        """Cost of one step over its wall time."""
        cost_ns = (
            workload.num_spans * (self.span_ns + self.record_ns)
            + workload.num_outer_spans * self.memory_sample_ns
        )
        return cost_ns / 1e9 / workload.step_s


def measure() -> tuple[LedgerCost, LedgerCost]:
    """Measures this machine: the quickest and the median of several rounds."""
    with tempfile.TemporaryDirectory() as folder:
        rounds = [_round(Path(folder) / f"rank{index}.jsonl") for index in range(_ROUNDS)]
    columns = list(zip(*rounds, strict=True))
    return LedgerCost(*map(min, columns)), LedgerCost(*map(statistics.median, columns))


def _round(path: Path) -> tuple[float, float, float]:
    """One step of a fresh ledger: ns per span, per memory sample, and per span for writing at the step's end."""
    ledger = Ledger(path)

    def one_span() -> None:
        with ledger.span("rollout", "decode") as span:
            span.add(tokens=1)

    with ledger.step(1):
        span_ns = _per_call(one_span, _SPANS_PER_ROUND)
        written_from = time.perf_counter_ns()
    record_ns = (time.perf_counter_ns() - written_from) / _SPANS_PER_ROUND
    ledger.close()
    return span_ns, _per_call(host_rss, 200), record_ns


def _per_call(call: Callable[[], object], count: int) -> float:
    start = time.perf_counter_ns()
    for _ in range(count):
        call()
    return (time.perf_counter_ns() - start) / count


def workload_of(run_dir: Path) -> Workload:
    """Medians of rank 0's steps.

    Raises:
        SystemExit: the run has no finished step.
    """
    ledgers = read_ledger(run_dir)
    steps = ledgers[0].steps() if ledgers else []
    if not steps:
        raise SystemExit(f"{run_dir}: no finished step in its ledger")
    outer: dict[int, int] = {}
    for process in ledgers[0].processes:
        counted: dict[int, int] = {}
        for span in process.spans:
            if span.step is not None and span.depth == 0:
                counted[span.step] = counted.get(span.step, 0) + 1
        outer.update(counted)  # a step done again after a resume counts as it was done last
    return Workload(
        num_spans=round(statistics.median(step.num_spans for step in steps)),
        num_outer_spans=round(statistics.median(outer.values())) if outer else 0,
        step_s=statistics.median(step.wall_s for step in steps),
    )


def main() -> None:
    """Prints the cost, as text or as one JSON line."""
    parser = argparse.ArgumentParser(description="Cost of the ledger.")
    parser.add_argument(
        "run", nargs="?", type=Path, help="folder of a run whose steps are taken as the workload"
    )
    parser.add_argument("--spans-per-step", type=int, default=600)
    parser.add_argument("--step-seconds", type=float, default=5.0)
    parser.add_argument("--json", action="store_true", help="one JSON line instead of text")
    options = parser.parse_args()
    workload = (
        workload_of(options.run)
        if options.run
        else Workload(options.spans_per_step, min(10, options.spans_per_step), options.step_seconds)
    )
    best, median = measure()
    shares = {"share_of_step": best.share_of(workload), "share_of_step_median": median.share_of(workload)}
    if options.json:
        print(json.dumps({**asdict(best), **asdict(workload), **shares}))
        return
    print(f"span opened and closed   {best.span_ns:8.0f} ns   (median {median.span_ns:.0f})")
    print(f"its record written       {best.record_ns:8.0f} ns   (median {median.record_ns:.0f})")
    print(
        f"memory sample            {best.memory_sample_ns:8.0f} ns   (median {median.memory_sample_ns:.0f})"
    )
    source = options.run or "assumed"
    print(
        f"step ({source}): {workload.num_spans} spans, {workload.step_s:.2f} s -> "
        f"{shares['share_of_step']:.3%} of the step (median {shares['share_of_step_median']:.3%})"
    )


if __name__ == "__main__":
    main()
