"""Writes logs as verl's loggers do, from the description of their formats: console, JSONL file logger, TensorBoard."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

LEGACY = (
    ("gen", 100.0),
    ("reward", 2.0),
    ("old_log_prob", 20.0),
    ("ref", 15.0),
    ("adv", 0.5),
    ("update_actor", 60.0),
)
V1 = (*LEGACY, ("update_weights", 6.0))
CRITIC = (("values", 12.0), ("update_critic", 30.0))


@dataclass
class VerlLogs:
    """One run; `metrics(step)` is what is logged of a step, the same for every logger."""

    num_steps: int = 5
    num_devices: int = 8
    is_v1: bool = True
    is_asynchronous: bool = False
    has_critic: bool = False
    save_every: int = 0
    test_every: int = 0
    residual_s: float = 5.0
    seed: int = 0
    extra: dict[str, float] = field(default_factory=dict)

    def stages(self, step: int) -> dict[str, float]:
        """Seconds by verl's name."""
        rng = random.Random(f"{self.seed}/{step}")
        parts = [*(V1 if self.is_v1 else LEGACY), *(CRITIC if self.has_critic else ())]
        seconds = {name: base * rng.uniform(0.9, 1.1) for name, base in parts}
        if self.is_asynchronous:
            seconds["gen"] = 8.0 * rng.uniform(0.5, 1.5)
        if self.save_every and step % self.save_every == 0:
            seconds["save_checkpoint"] = 25.0
        return seconds

    def response_tokens(self, step: int) -> int:
        """Response tokens of all samples."""
        return 1024 * (2000 + 3 * step)

    def metrics(self, step: int) -> dict[str, float]:
        """Everything logged of a step."""
        stages = self.stages(step)
        wall = sum(stages.values()) + self.residual_s
        response = self.response_tokens(step)
        total = response + 1024 * 500
        memory = "actor/perf" if self.is_v1 else "perf"
        logged = {f"timing_s/{name}": seconds for name, seconds in stages.items()}
        logged |= {
            "timing_s/step": wall,
            "timing_s/agent_loop/generate_sequences/max": stages["gen"] * 0.98,
            "timing_s/agent_loop/generate_sequences/mean": stages["gen"] * 0.6,
            "timing_per_token_ms/gen": stages["gen"] * 1000 / response,
            "timing_per_token_ms/update_actor": stages["update_actor"] * 1000 / total,
            "perf/total_num_tokens": total,
            "perf/time_per_step": wall,
            "perf/throughput": total / wall / self.num_devices,
            "perf/mfu/actor": 0.31,
            f"{memory}/max_memory_allocated_gb": 40.0 + step / 100,
            f"{memory}/max_memory_reserved_gb": 60.0,
            f"{memory}/cpu_memory_used_gb": 200.0,
            "critic/score/mean": 0.2 + step / 10_000,
            "critic/rewards/mean": 0.2 + step / 10_000,
            "critic/rewards/max": 1.0,
            "actor/entropy": 0.4,
            "actor/pg_loss": -0.01,
            "actor/kl_loss": 0.002,
            "actor/pg_clipfrac": 0.004,
            "actor/ppo_kl": 0.0003,
            "actor/grad_norm": 0.2,
            "actor/lr": 1e-6,
            "response_length/mean": response / 1024,
            "response_length/max": 4096.0,
            "response_length/min": 12.0,
            "response_length/clip_ratio": 0.03,
            "prompt_length/mean": 500.0,
            "global_seqlen/minmax_diff": 90_000,
            "global_seqlen/balanced_min": 300_000,
            "global_seqlen/balanced_max": 303_000,
            "training/global_step": step,
            "training/epoch": 0,
        }
        if self.is_asynchronous:
            logged["training/off_policy/staleness/mean"] = 1.5
        if self.test_every and step % self.test_every == 0:
            logged["timing_s/testing"] = 30.0
            logged["val-core/openai/gsm8k/acc/mean@1"] = 0.5
            logged["val-core/openai/gsm8k/reward/mean@1"] = 0.55
        return logged | self.extra

    def steps(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Every step with its metrics."""
        for step in range(1, self.num_steps + 1):
            yield step, self.metrics(step)

    def write_console(self, path: Path, ray: bool = True, numpy: bool = False) -> Path:
        """The terminal's output: step lines among others, with Ray's prefix and colours."""
        prefix = "\x1b[36m(TaskRunner pid=4242)\x1b[0m " if ray else ""
        with path.open("w", encoding="utf-8") as file:
            file.write(f"{prefix}Initial validation metrics: {{'val-core/gsm8k/acc/mean@1': 0.3}}\n")
            file.write(f"{prefix}step:0 - val-core/openai/gsm8k/acc/mean@1:{_printed(0.3, numpy)}\n")
            for step, metrics in self.steps():
                file.write("Training Progress:  10%|#         | 1/10 [00:10<01:30, 10.0s/it]\n")
                pairs = " - ".join(f"{name}:{_printed(value, numpy)}" for name, value in metrics.items())
                file.write(f"{prefix}step:{step} - {pairs}\n")
                file.write(
                    "(WorkerDict pid=77) WARNING step: something - else [repeated 7x across cluster]\n"
                )
        return path

    def write_file_logger(self, path: Path) -> Path:
        """The JSONL of the `file` logger."""
        with path.open("w", encoding="utf-8") as file:
            for step, metrics in self.steps():
                file.write(json.dumps({"step": step, "data": metrics}) + "\n")
        return path

    def write_dumps(self, folder: Path, num_prompts: int = 2, num_samples: int = 2) -> Path:
        """Rollout dumps, one file a step."""
        folder.mkdir(parents=True)
        for step in range(1, self.num_steps + 1):
            rows = [
                {
                    "input": f"question {prompt}",
                    "output": f"answer {sample} of step {step}",
                    "gts": "42",
                    "score": float(sample % 2),
                    "step": step,
                }
                for prompt in range(num_prompts)
                for sample in range(num_samples)
            ]
            (folder / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    def write_tensorboard(
        self, folder: Path, start_unix_s: float = 1_700_000_000.0, gap_s: float = 3.0
    ) -> Path:
        """Event files; each line is written at the end of its step and test, `gap_s` before the next step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = EventFileWriter(str(folder))
        now = start_unix_s
        for step, metrics in self.steps():
            now += metrics["timing_s/step"] + metrics.get("timing_s/testing", 0.0)
            values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
            writer.add_event(Event(wall_time=now, step=step, summary=Summary(value=values)))
            now += gap_s
        writer.close()
        return folder


def _printed(value: float, numpy: bool) -> str:
    return f"np.float64({value!r})" if numpy and isinstance(value, float) else repr(value)
