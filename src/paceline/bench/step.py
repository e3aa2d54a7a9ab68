"""`paceline bench step`: whole GRPO steps on a fixed workload, and the same with a peer in its own environment.

The workload fixes weights, prompts, samples per prompt, response length (end tokens are ignored), dtype and threads.
Ratios are between medians of the same number of timed steps in the same sitting; the first step warms up.
"""

import json
import os
import statistics
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from paceline.config import Config, ConfigError, load_config
from paceline.data.tasks import build_task
from paceline.model.loading import load_tokenizer
from paceline.schedules import run_training
from paceline.telemetry.environment import cpu_model, package_versions
from paceline.telemetry.metrics import read_metrics
from paceline.types import STAGES

PROMPTS = "prompts.jsonl"
PEER_PYTHON = Path(".venv-trl/bin/python")
PEER_SCRIPT = Path("benchmarks/peers/trl_step.py")

_WORDS = (
    *("river", "stone", "lantern", "copper", "window", "garden", "silver"),
    *("thunder", "meadow", "harbor", "pencil", "winter", "orchard", "signal"),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """What both sides compute. `prompts` are rendered texts; lengths in tokens."""

    model: str
    prompts: list[dict[str, str]]
    num_samples: int
    new_tokens: int
    num_steps: int
    dtype: str
    num_threads: int
    trl_micro_batch: int
    output_dir: str


def make_workload(
    model: str,
    num_prompts: int,
    num_samples: int,
    new_tokens: int,
    num_steps: int,
    dtype: str,
    num_examples: int,
    folder: Path,
) -> Workload:
    """Chat prompts with worked examples as earlier turns, rendered once, by the same code that renders a run's."""
    rows = []
    for index in range(num_prompts):
        messages = []
        for example in range(num_examples):
            messages.append({"role": "user", "content": _question(100 + 5 * example)})
            messages.append({"role": "assistant", "content": ", ".join(_words(100 + 5 * example)[::-1])})
        messages.append({"role": "user", "content": _question(3 * index)})
        rows.append(json.dumps({"prompt": messages, "answer": str(index)}) + "\n")
    (folder / PROMPTS).write_text("".join(rows))
    config = _config(model, num_prompts, num_samples, new_tokens, num_steps, dtype, folder)
    task = build_task(config, load_tokenizer(config.model))
    return Workload(
        model=model,
        prompts=[{"text": prompt.text} for prompt in task.train],
        num_samples=num_samples,
        new_tokens=new_tokens,
        num_steps=num_steps,
        dtype=dtype,
        num_threads=torch.get_num_threads(),
        trl_micro_batch=num_prompts * num_samples,
        output_dir=str(folder / "peer"),
    )


def run_ours(workload: Workload, folder: Path) -> dict[str, Any]:
    """Trains `num_steps` steps and reads the seconds back from the run's own records."""
    config = _config(
        workload.model,
        len(workload.prompts),
        workload.num_samples,
        workload.new_tokens,
        workload.num_steps,
        workload.dtype,
        folder,
    )
    run_training(config, Console(quiet=True))
    records = [record.metrics for record in read_metrics(folder / "ours") if record.step > 0]
    timed = records[1:] or records
    stages = {
        stage: statistics.median(r.get(f"time/{stage}", 0.0) for r in timed)
        for stage in STAGES
        if any(f"time/{stage}" in r for r in timed)
    }
    return {
        "step_s": [record["time/step"] for record in records],
        "median_s": statistics.median(record["time/step"] for record in timed),
        "stages": stages,
        "laid_out_tokens": timed[-1].get("tokens/laid_out"),
        "prompt_and_response_tokens": timed[-1]["tokens/prompt"] + timed[-1]["tokens/response"],
    }


def run_peer(workload: Workload, folder: Path) -> dict[str, Any]:
    """The same workload in the peer's environment.

    Raises:
        ConfigError: the peer's environment or script is not there.
        RuntimeError: the peer failed; its last lines are in the message.
    """
    for path in (PEER_PYTHON, PEER_SCRIPT):
        if not path.exists():
            raise ConfigError(
                "--peer", "trl", f"{path} does not exist here", "run `make bench-peers` in a checkout"
            )
    file = folder / "workload.json"
    file.write_text(json.dumps(asdict(workload)))
    done = subprocess.run(
        [str(PEER_PYTHON), str(PEER_SCRIPT), str(file)], capture_output=True, text=True, env=dict(os.environ)
    )
    if done.returncode != 0:
        raise RuntimeError("the peer failed: " + "\n".join(done.stderr.strip().splitlines()[-15:]))
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    timed = found["step_s"][1:] or found["step_s"]
    return {**found, "median_s": statistics.median(timed)}


def bench_step(
    model: str,
    num_prompts: int,
    num_samples: int,
    new_tokens: int,
    num_steps: int,
    dtype: str,
    num_examples: int,
    peer: str | None,
    folder: Path,
) -> dict[str, Any]:
    """Runs the workload (and the peer, if named) and returns figures with everything that they depend on."""
    folder.mkdir(parents=True, exist_ok=True)
    workload = make_workload(
        model, num_prompts, num_samples, new_tokens, num_steps, dtype, num_examples, folder
    )
    result: dict[str, Any] = {
        "workload": {**asdict(workload), "prompts": len(workload.prompts), "num_examples": num_examples},
        "cpu": cpu_model(),
        "versions": package_versions(),
        "paceline": run_ours(workload, folder),
    }
    if peer is not None:
        result[peer] = run_peer(workload, folder)
        result["ratio"] = result[peer]["median_s"] / result["paceline"]["median_s"]
    return result


def _words(start: int) -> list[str]:
    return [_WORDS[(start + offset) % len(_WORDS)] for offset in range(4)]


def _question(start: int) -> str:
    return f"Reverse this list of words and answer with the words alone: {', '.join(_words(start))}"


def _config(
    model: str,
    num_prompts: int,
    num_samples: int,
    new_tokens: int,
    num_steps: int,
    dtype: str,
    folder: Path,
) -> Config:
    return load_config(
        None,
        sections={
            "run": {
                "name": "ours",
                "dir": str(folder),
                "num_steps": num_steps,
                "resume": "never",
                "save_samples_every": 0,
            },
            "model": {"path": model, "dtype": dtype},
            "task": {
                "path": str(folder / PROMPTS),
                "eval_size": 0,
                "reward": "paceline.bench.length_reward:length_reward",
                "shuffle": False,
            },
            "batch": {"num_prompts": num_prompts, "num_samples": num_samples, "token_budget": 8192},
            "rollout": {"max_new_tokens": new_tokens, "ignore_eos": True},
            "train": {"lr": 1e-6, "logprob_chunk": 256},
            "checkpoint": {"save_final": False},
            "telemetry": {"live": "off"},
        },
    )
