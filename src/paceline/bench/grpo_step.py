"""`paceline bench step --model SHAPE`: whole GRPO steps of a published shape with random weights, ledger included.

A step is what `paceline train` runs: sampling to forced lengths on the trainer's own weights, a cheap reward,
advantages and one update, no KL. Prompts and vocabulary are words made for the purpose, as many as the shape's
vocabulary has entries, so that every sampled id is text.

Workload `group`, at full size: 64 prompts x 8 samples, 256 tokens in, 512 out.
"""

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from paceline.bench.shapes import shape_config
from paceline.config import Config, load_config
from paceline.schedules import run_training
from paceline.telemetry.environment import cpu_model, package_versions
from paceline.telemetry.metrics import read_metrics
from paceline.types import STAGES

_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class GrpoStepBench:
    """What is run; `shrink` divides counts and lengths, to see on any machine that the benchmark runs."""

    model: str
    num_steps: int = 4
    shrink: int = 1
    token_budget: int = 32_768
    recompute: str = "none"
    exact: bool = False

    @property
    def num_prompts(self) -> int:
        """Prompts of a step."""
        return max(2, 64 // self.shrink)

    @property
    def prompt_tokens(self) -> int:
        """Tokens in."""
        return max(2, 256 // self.shrink)

    @property
    def new_tokens(self) -> int:
        """Tokens out, forced."""
        return max(2, 512 // self.shrink)


def bench_grpo_step(bench: GrpoStepBench, folder: Path) -> dict[str, Any]:
    """Runs the steps in `folder` and reads their figures back from the run's own records; the first warms up."""
    _write_model(bench.model, folder / "model")
    _write_prompts(bench, folder / "prompts.jsonl")
    run_training(_config(bench, folder), Console(quiet=True))
    run_dir = folder / "bench"
    records = [record.metrics for record in read_metrics(run_dir) if record.step > 0]
    timed = records[1:] or records
    step_s = statistics.median(record["time/step"] for record in timed)
    stages = {
        stage: statistics.median(record.get(f"time/{stage}", 0.0) for record in timed)
        for stage in (*STAGES, "unaccounted")
        if any(f"time/{stage}" in record for record in timed)
    }
    environment = json.loads((run_dir / "env.json").read_text())
    response_tokens = bench.num_prompts * 8 * bench.new_tokens
    return {
        "workload": {
            "name": "group",
            **asdict(bench),
            "num_samples": 8,
            "prompt_tokens": bench.prompt_tokens,
        },
        "step_s": [record["time/step"] for record in records],
        "median_s": step_s,
        "ledger": stages,
        "rollout_tokens_per_s": response_tokens / stages["rollout"],
        "metrics": {
            name: value
            for name, value in timed[-1].items()
            if name.startswith(("mfu", "tokens", "memory", "rollout/"))
        },
        "features": environment.get("features", {}),
        "device": environment.get("device_name") or cpu_model(),
        "torch": torch.__version__,
        "versions": package_versions(),
    }


def _write_model(name: str, folder: Path) -> None:
    """A folder with the shape's config and a tokenizer of its vocabulary's size, and no weights."""
    config = shape_config(name)
    config.save_pretrained(folder)
    words = {f"w{index}": index for index in range(config.vocab_size - 2)}
    vocabulary = {**words, "<unk>": len(words), "</s>": len(words) + 1}
    raw = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)


def _write_prompts(bench: GrpoStepBench, path: Path) -> None:
    rng = np.random.default_rng(0)
    vocabulary = shape_config(bench.model).vocab_size - 2
    rows = []
    for index in range(bench.num_prompts * bench.num_steps):
        words = " ".join(f"w{word}" for word in rng.integers(0, vocabulary, bench.prompt_tokens))
        rows.append(json.dumps({"prompt": words, "answer": str(index)}) + "\n")
    path.write_text("".join(rows))


def _config(bench: GrpoStepBench, folder: Path) -> Config:
    longest = bench.prompt_tokens + bench.new_tokens
    budget = max(bench.token_budget // bench.shrink, 2 * longest)
    return load_config(
        None,
        sections={
            "run": {
                "name": "bench",
                "dir": str(folder),
                "num_steps": bench.num_steps,
                "resume": "never",
                "save_samples_every": 0,
            },
            "model": {"path": str(folder / "model"), "random_weights": True, "verify_packing": False},
            "task": {
                "path": str(folder / "prompts.jsonl"),
                "eval_size": 0,
                "reward": "paceline.bench.length_reward:length_reward",
                "reward_workers": 1,
                "shuffle": False,
            },
            "batch": {"num_prompts": bench.num_prompts, "num_samples": 8, "token_budget": budget},
            "rollout": {
                "max_new_tokens": bench.new_tokens,
                "ignore_eos": True,
                "max_running": bench.num_prompts * 8,
                "exact": bench.exact,
            },
            "train": {"lr": 1e-6, "logprob_chunk": 2048, "gradient_checkpointing": bench.recompute},
            "checkpoint": {"save_final": False},
            "telemetry": {"live": "off"},
        },
    )


def grpo_step_text(result: dict[str, Any]) -> str:
    """The figures as lines for a person."""
    stages = " · ".join(f"{stage} {seconds:.2f}" for stage, seconds in result["ledger"].items())
    return (
        f"{result['workload']['model']} · {result['device']}: {result['median_s']:.2f} s per GRPO step, "
        f"{result['rollout_tokens_per_s']:,.0f} generated tok/s in the rollout\n  {stages}"
    )
