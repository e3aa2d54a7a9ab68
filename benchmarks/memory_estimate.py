"""The memory estimate against the peak that a GPU measures, for fixed configurations.

usage: python benchmarks/memory_estimate.py [--case NAME ...] [--one-process] [--estimate-only] [--json]

Every case trains a random-weight model on one device, in a process of its own unless told otherwise (kernels then
compile once): two updates of three micro-batches that
fill the token budget, the optimiser's states in place, and the allocator's peak over the second update. Estimated is
what `--dry-run` would say of the same config without a rollout. Exit code 1 when a case is off by more than 10 %.
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from paceline.bench.shapes import shape_config
from paceline.config import Config, load_config
from paceline.engine.samples import TrainSample
from paceline.engine.trainer import TrainEngine
from paceline.model.families import check_family
from paceline.model.fused import fuse_for_device
from paceline.model.loading import CausalModel, wrap_model
from paceline.planner.memory import GIB, MemoryEstimate, estimate_model
from paceline.planner.model_shape import MemoryShape
from paceline.planner.run_facts import RunFacts
from paceline.planner.run_memory import trained_model
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator

_ALLOWED_ERROR = 0.10
_PROMPT, _RESPONSE = 64, 960
_SEQUENCE = _PROMPT + _RESPONSE
_MICRO_BATCHES = 3  # from the third on, gradient sums are float32 before the pass begins


@dataclass(frozen=True, slots=True)
class Case:
    """A model shape, its token budget, and settings beside the defaults."""

    shape: str
    tokens: int
    overrides: tuple[str, ...]


_ALL = "train.gradient_checkpointing=all"
_SELECTIVE = "train.gradient_checkpointing=selective"
_PLAIN = "train.preset=plain"
CASES: dict[str, Case] = {
    "0.6b-plain-16k": Case("qwen3-0.6b", 16_384, (_PLAIN,)),
    "0.6b-fast-32k": Case("qwen3-0.6b", 32_768, ()),
    "1.7b-fast-16k": Case("qwen3-1.7b", 16_384, ()),
    "1.7b-fast-selective-32k": Case("qwen3-1.7b", 32_768, (_SELECTIVE,)),
    "1.7b-plain-all-32k": Case("qwen3-1.7b", 32_768, (_PLAIN, _ALL)),
    "1.7b-fast-all-offload-16k": Case("qwen3-1.7b", 16_384, (_ALL, "train.optimizer_offload=true")),
    "4b-fast-all-16k": Case("qwen3-4b", 16_384, (_ALL,)),
}


def case_config(case: Case) -> Config:
    """The run config of a case; nothing is read from its paths."""
    sections = {
        "model": {"path": case.shape},
        "task": {"path": "none"},
        "batch": {
            "num_prompts": _MICRO_BATCHES * case.tokens // _SEQUENCE,
            "num_samples": 2,
            "token_budget": case.tokens,
        },
        "rollout": {"max_new_tokens": _RESPONSE},
        "cluster": {"device": "cuda"},
    }
    return load_config(None, case.overrides, sections=sections)


def estimate_case(case: Case) -> MemoryEstimate:
    """What the planner says of the training of a case."""
    config = case_config(case)
    facts = RunFacts(MemoryShape.from_hf_config(shape_config(case.shape).to_dict()), element_bytes=2)
    model = trained_model(config, facts, config.batch)
    response = case.tokens // _SEQUENCE * _RESPONSE
    return MemoryEstimate(estimate_model(replace(model, response_tokens=response)))


def measure_case(case: Case) -> dict[str, Any]:
    """Peak of the second update, in bytes, and seconds of the whole measurement."""
    started = time.perf_counter()
    config, device = case_config(case), torch.device("cuda")
    model = _random_model(case.shape, device)
    if config.train.preset == "fast":
        fused = fuse_for_device(model.module, device)
        assert fused.num_layers, fused.reason
    engine = TrainEngine(model, config, Ledger(), num_updates=2)
    samples = _samples(_MICRO_BATCHES * case.tokens // _SEQUENCE)
    engine.update(samples, MetricAccumulator())
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    metrics = MetricAccumulator()
    engine.update(samples, metrics)
    torch.cuda.synchronize()
    found = metrics.reduce()
    assert found["micro_batches"] == _MICRO_BATCHES
    assert found["tokens/laid_out"] == _MICRO_BATCHES * case.tokens
    return {
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "held_bytes": held,
        "seconds": round(time.perf_counter() - started, 1),
    }


def _random_model(name: str, device: torch.device) -> CausalModel:
    shape = shape_config(name)
    with device:
        module = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    return wrap_model(module, device, check_family(shape, type(module)))


def _samples(count: int) -> list[TrainSample]:
    """Sequences of one length without a common prefix."""
    draw = np.random.default_rng(0)
    return [
        TrainSample(
            prompt_id=str(index),
            prompt_ids=tuple(draw.integers(0, 1000, _PROMPT).tolist()),
            response_ids=tuple(draw.integers(0, 1000, _RESPONSE).tolist()),
            loss_mask=np.ones(_RESPONSE, dtype=np.float32),
            advantages=np.full(_RESPONSE, 1.0 if index % 2 else -1.0, dtype=np.float32),
            rollout_logprobs=np.full(_RESPONSE, -11.0, dtype=np.float32),
        )
        for index in range(count)
    ]


def compare(name: str, estimate_only: bool, one_process: bool) -> dict[str, Any]:
    """One case: parts and total as estimated, and as measured."""
    case, estimate = CASES[name], estimate_case(CASES[name])
    row: dict[str, Any] = {
        "case": name,
        "shape": case.shape,
        "tokens": case.tokens,
        "settings": list(case.overrides),
        "estimated_gib": {
            part.name: round(part.num_bytes / GIB, 3) for part in estimate.parts if part.num_bytes
        },
        "estimated_total_gib": round(estimate.total / GIB, 2),
        "estimated_peak": " ".join(estimate.peak_phase),
    }
    if estimate_only:
        return row
    measured = measure_case(case) if one_process else _measured_apart(name)
    if one_process:
        gc.collect()
        torch.cuda.empty_cache()
    if "failed" in measured:
        return {**row, **measured}
    return {
        **row,
        "measured_peak_gib": round(measured["peak_bytes"] / GIB, 2),
        "measured_between_updates_gib": round(measured["held_bytes"] / GIB, 2),
        "error": round(estimate.total / measured["peak_bytes"] - 1.0, 4),
        "seconds": measured["seconds"],
    }


def _measured_apart(name: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, "--measure", name], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1:]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def main() -> int:
    """Runs the cases; see the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=CASES)
    parser.add_argument("--one-process", action="store_true")
    parser.add_argument("--estimate-only", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--measure", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure_case(CASES[arguments.measure])))
        return 0
    rows = [compare(name, arguments.estimate_only, arguments.one_process) for name in arguments.case or CASES]
    if arguments.json:
        device = None if arguments.estimate_only else torch.cuda.get_device_name()
        print(json.dumps({"device": device, "torch": torch.__version__, "cases": rows}, indent=2))
    else:
        for row in rows:
            measured = row.get("measured_peak_gib", row.get("failed", "-"))
            print(
                f"{row['case']:<20} estimated {row['estimated_total_gib']:7.2f} GiB  measured {measured}",
                end="",
            )
            print(f"  error {row['error']:+.1%}" if "error" in row else "")
    bad = [row for row in rows if "failed" in row or abs(row.get("error", 0.0)) > _ALLOWED_ERROR]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
