"""Writes run folders for the report's tests: the real ledger and metric log under a clock that moves when told to."""

import json
import math
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.config import dump_config, load_config
from paceline.telemetry.ledger import Ledger, MemorySample
from paceline.telemetry.metrics import MetricLog

EXAMPLES = "".join(
    f"<|im_start|>user\nReverse the order of the words: {a} {b}<|im_end|>\n<|im_start|>assistant\n{b} {a}<|im_end|>\n"
    for a, b in (("river", "stone"), ("candle", "north"), ("paper", "glass"), ("autumn", "violin"))
)
WORDS = ("maple", "harbor", "silver", "window", "orange", "summer", "valley", "garden", "copper", "marble")


class Clock:
    """Nanoseconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 5_000_000

    def __call__(self) -> int:
        return self.now

    def wait(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += round(seconds * 1e9)


@dataclass
class RunWriter:
    """Writes one run; the knobs are what tests vary."""

    run_dir: Path
    num_steps: int = 40
    device_name: str | None = None
    num_prompts: int = 128
    seed: int = 0
    update_share: float = 1.0
    metric_overrides: dict[int, dict[str, float]] = field(default_factory=dict)
    completions: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.run_dir.mkdir(parents=True, exist_ok=True)

    def write_all(self) -> Path:
        """A completed run with everything in its folder."""
        self.write_config()
        self.write_environment()
        self.write_process(range(1, self.num_steps + 1))
        self.write_summary("completed")
        return self.run_dir

    def write_config(self) -> None:
        """config.yaml of a plausible run."""
        config = load_config(
            None,
            [
                f"run.name={self.run_dir.name}",
                f"run.num_steps={max(1, self.num_steps)}",
                "model.path=SmolLM2-135M-Instruct",
                "task.name=word_sequence_reversal",
                f"task.eval_size={self.num_prompts}",
            ],
        )
        (self.run_dir / "config.yaml").write_text(dump_config(config), encoding="utf-8")

    def write_environment(self) -> None:
        """env.json as the driver writes it."""
        environment = {
            "v": 1,
            "python": "3.11.9",
            "platform": "Linux-6.1",
            "device": "cuda" if self.device_name else "cpu",
            "device_name": self.device_name,
            "dtype": "bfloat16",
            "cpu": {"model": "Example CPU @ 2.4GHz", "num_usable_cores": 2, "memory_bytes": 16 * 2**30},
            "packages": {"paceline": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
            "features": {"packed_attention": "pieces", "bf16_matrix_units": True},
        }
        (self.run_dir / "env.json").write_text(json.dumps(environment), encoding="utf-8")

    def write_summary(self, status: str, **figures: Any) -> None:
        """summary.json."""
        summary = {
            "v": 1,
            "status": status,
            "message": "",
            "num_steps": self.num_steps,
            "old_logprob": {"source": "current", "reason": "one update per rollout"},
            "accuracy_before": 23 / 128,
            "accuracy_after": 61 / 128,
            "accuracy_constant": 2 / 128,
            "constant_answer": "silver harbor",
            "num_eval_prompts": self.num_prompts,
            "num_eval_completions": self.num_prompts,
        } | figures
        (self.run_dir / "summary.json").write_text(json.dumps(summary), encoding="utf-8")

    def write_process(self, steps: range, rank: int = 0, evaluates: bool = True) -> None:
        """One process: set-up, an evaluation before step 1, steps, an evaluation in the last, a final save."""
        clock = Clock()
        self.rss = 1.1e9
        ledger = Ledger(
            self.run_dir / "ledger" / f"rank{rank}.jsonl",
            rank,
            clock_ns=clock,
            sample_memory=lambda: self._memory(),
        )
        log = MetricLog(self.run_dir) if rank == 0 else None
        with ledger.span("setup", "model"):
            clock.wait(3.2)
        clock.wait(0.01)
        if evaluates and steps and steps[0] == 1:
            self._evaluate(ledger, clock)
            if log:
                log.record(0, {"eval/accuracy": 23 / 128, "eval/completions": 128})
        for step in steps:
            with ledger.step(step):
                self._step(ledger, clock, step, evaluates and step == self.num_steps)
            if log:
                values = self._metrics(step, ledger)
                if evaluates and step == self.num_steps:
                    values["eval/accuracy"] = 61 / 128
                log.record(step, values | self.metric_overrides.get(step, {}))
                self._write_samples(step)
        with ledger.span("checkpoint", "finish writing"):
            clock.wait(0.4)
        ledger.close()
        if log:
            log.close()

    def _memory(self) -> MemorySample:
        self.rss += 2e5
        device = 41e9 if self.device_name else 0
        return MemorySample(int(device * self.random.uniform(0.5, 1)), int(device * 1.05), int(self.rss))

    def _evaluate(self, ledger: Ledger, clock: Clock) -> None:
        with ledger.span("eval", absorb=True), ledger.span("rollout"):
            clock.wait(2.4)

    def _step(self, ledger: Ledger, clock: Clock, step: int, evaluates: bool) -> None:
        pace = self.random.uniform(0.9, 1.15)
        with ledger.span("data"):
            clock.wait(0.002)
        with ledger.span("rollout") as rollout:
            with ledger.span("rollout", "prefill", cause="compute") as span:
                span.add(tokens=900)
                clock.wait(0.5 * pace)
            for _ in range(16):
                with ledger.span("rollout", "decode", cause="memory") as span:
                    span.add(tokens=56)
                    clock.wait(0.11 * pace)
            rollout.add(flops=7e11)
        clock.wait(0.004)
        with ledger.span("reward"):
            clock.wait(0.21 * pace)
        with ledger.span("advantage"):
            clock.wait(0.003)
        with ledger.span("update_actor") as update:
            for _ in range(3):
                with ledger.span("update_actor", "forward-backward", cause="compute"):
                    clock.wait(0.62 * pace * self.update_share)
                clock.wait(0.006)
            with ledger.span("update_actor", "optimiser", cause="memory"):
                clock.wait(0.34)
            update.add(tokens=5200, flops=4.1e12)
        with ledger.span("sync"):
            clock.wait(0.001)
        if evaluates:
            self._evaluate(ledger, clock)
        if step % 20 == 0:
            with ledger.span("checkpoint"):
                clock.wait(0.3)
            ledger.background("checkpoint", "write", clock() - 10**8, clock() + 10**9)
        clock.wait(0.002)

    def _metrics(self, step: int, ledger: Ledger) -> dict[str, float]:
        section = ledger.last_section
        assert section is not None
        progress = step / max(1, self.num_steps)
        noise = self.random.gauss(0, 0.035)
        learned = 0.18 + 0.32 / (1 + math.exp(-8 * (progress - 0.45)))
        return {
            "reward/mean": learned + noise,
            "accuracy/train": learned + noise,
            "reward/timeouts": float(step == 7),
            "reward/errors": 0.0,
            "samples/without_verdict": float(step == 7),
            "groups/zero_signal": float(self.random.randint(2, 7)),
            "samples/truncated": float(max(0, round(9 * (1 - progress)))),
            "truncated_fraction": max(0.0, 0.07 * (1 - progress) + self.random.uniform(0, 0.01)),
            "updates/applied": 1.0,
            "updates/skipped": 0.0,
            "response_length/mean": 7.4 - 1.3 * progress + noise * 4,
            "response_length/max": float(self.random.randint(12, 16)),
            "entropy": 0.9 - 0.4 * progress + noise,
            "kl/old": 0.0,
            "ratio/mean": 1.0,
            "ratio/max": 1.0,
            "clip_fraction": 0.0,
            "grad_norm": 1.4 + 6 * noise,
            "lr": 1e-5,
            "tokens/effective_share": 1.9 + noise,
            "throughput/tokens_per_s": 7000 / section.wall_s,
            "throughput/generated_tokens_per_s": 1800 / section.stage_s["rollout"],
            "time/step": section.wall_s,
            "time/rollout": section.stage_s["rollout"],
        }

    def _write_samples(self, step: int) -> None:
        folder = self.run_dir / "samples"
        folder.mkdir(exist_ok=True)
        rows = []
        for prompt in range(6):
            words = self.random.sample(WORDS, 3)
            question = f"<|im_start|>user\nReverse the order of the words: {' '.join(words)}<|im_end|>\n"
            answer = " ".join(reversed(words))
            for index in range(4):
                correct = self.random.random() < 0.2 + 0.5 * step / self.num_steps
                completion = answer if correct else " ".join(words)
                if index == 0 and prompt in self.completions:
                    completion = self.completions[prompt]
                rows.append(
                    {
                        "v": 1,
                        "step": step,
                        "prompt_id": f"train-{prompt}",
                        "sample_index": index,
                        "prompt": f"{EXAMPLES}{question}<|im_start|>assistant\n",
                        "completion": completion,
                        "answer": answer,
                        "outcome": "score",
                        "score": float(correct),
                        "reward": float(correct),
                        "finish_reason": "stop",
                    }
                )
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"step{step}.jsonl").write_text(text, encoding="utf-8")
