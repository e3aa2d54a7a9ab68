"""Writes run folders that grow, for tests of what follows them: the real ledger and metric log."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricLog

HEALTHY = {
    "reward/mean": 0.5,
    "reward/std": 0.4,
    "reward/errors": 0,
    "samples/without_verdict": 0,
    "loss/total": 0.01,
    "grad_norm": 1.0,
    "entropy": 0.4,
    "updates/applied": 1,
    "updates/skipped": 0,
    "tokens/response": 100,
    "truncated_fraction": 0.1,
    "memory/host_rss": 2**30,
    "throughput/tokens_per_s": 900.0,
    "throughput/tokens_per_s_per_device": 450.0,
    "throughput/generated_tokens_per_s": 200.0,
    "rollout/logprob_difference_mean": 0.001,
    "balance/busy_max_over_mean": 1.02,
    "balance/slowest_rank": 1,
    "checkpoint/blocked_s": 0.25,
    "time/step": 1.0,
    "time/rollout": 0.6,
    "time/update_actor": 0.4,
    "time/unaccounted": 0.0,
}
STAGES = {"rollout": 0.6, "update_actor": 0.3, "idle": 0.1}


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
class GrowingRun:
    """A run that a test lets go on step by step. `process` begins a new process, as a resume does."""

    run_dir: Path
    num_steps: int = 20
    num_ranks: int = 2
    ledgers: list[Ledger] = field(default_factory=list)
    log: MetricLog | None = None

    def __post_init__(self) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        config = (
            f"run:\n  name: {self.run_dir.name}\n  num_steps: {self.num_steps}\nalgorithm:\n  name: grpo\n"
        )
        (self.run_dir / "config.yaml").write_text(config)
        self.clock = Clock()
        self.process()

    def process(self) -> None:
        """A process begins; what the one before had open is closed."""
        self.close()
        self.ledgers = [
            Ledger(self.run_dir / "ledger" / f"rank{rank}.jsonl", rank, clock_ns=self.clock)
            for rank in range(self.num_ranks)
        ]
        self.log = MetricLog(self.run_dir)

    def step(self, step: int, **metrics: float) -> None:
        """One step on every rank; keywords replace or add metrics, `__` standing for a slash."""
        for rank, ledger in enumerate(self.ledgers):
            with ledger.step(step):
                for stage, seconds in STAGES.items():
                    with ledger.span(stage, tokens=10 * (rank + 1), flops=1e9):
                        self.clock.wait(seconds)
        assert self.log is not None
        changed = {name.replace("__", "/"): value for name, value in metrics.items()}
        self.log.record(step, HEALTHY | changed)

    def steps(self, first: int, last: int, **metrics: float) -> None:
        """Several steps alike."""
        for step in range(first, last + 1):
            self.step(step, **metrics)

    def summary(self, status: str, message: str = "") -> None:
        """summary.json, later than all that was written before it."""
        path = self.run_dir / "summary.json"
        path.write_text(json.dumps({"v": 1, "status": status, "message": message}))
        later = path.stat().st_mtime + 1
        os.utime(path, (later, later))

    def close(self) -> None:
        """Ends the process."""
        for ledger in self.ledgers:
            ledger.close()
        if self.log is not None:
            self.log.close()
