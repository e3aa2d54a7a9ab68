"""`paceline bench train`: the trainer's passes over one packed micro-batch of a published shape with random weights.

What is timed is what a run executes: `TrainEngine.update` and `.score`. Forward and backward are also timed without
the rest of the update, over several repeats with no wait between them, so that their MFU compares with what others
publish. FLOPs follow telemetry/flops.py (causal attention, input embedding not counted, recomputation not counted).
"""

import datetime
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from paceline.bench.kernel_classes import time_by_class
from paceline.bench.shapes import shape_config
from paceline.config import Config, load_config
from paceline.engine.planning import build_micro_batch, plan_batch
from paceline.engine.planning import cost_model as cost_of
from paceline.engine.samples import TrainSample
from paceline.engine.trainer import TrainEngine
from paceline.model.families import check_family
from paceline.model.flash_kernels import kernel_for
from paceline.model.fused import FusionOutcome, fuse_for_device
from paceline.model.loading import CausalModel, resolve_device, resolve_dtype, wrap_model
from paceline.telemetry.environment import package_versions
from paceline.telemetry.flops import forward_flops
from paceline.telemetry.hardware import known_peak_tflops
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator

GIB = 2**30


@dataclass(frozen=True, slots=True)
class TrainWorkload:
    """What is computed. `num_tokens` in one micro-batch.

    `group`: None packs single samples of 256 to 1,791 tokens; else (prompt tokens, samples, response tokens) of groups
    that share their prompts, as many as fit, computed once per prompt if `share_prefixes`.
    """

    model: str
    num_tokens: int
    recompute: Literal["none", "selective", "all"] = "none"
    selective_keep: Literal["matmuls", "half_matmuls", "attention"] = "matmuls"
    preset: Literal["fast", "plain"] = "fast"
    logprob_chunk: int = 2048
    group: tuple[int, int, int] | None = None
    share_prefixes: bool = True
    with_optimizer: bool = True
    num_repeats: int = 5


def bench_train(workload: TrainWorkload) -> dict[str, Any]:
    """Runs the workload and returns its figures with everything they depend on. Seconds unless a name says else."""
    device = resolve_device("auto")
    model, fusion = _model(workload, device)
    samples = _samples(workload, model.shape.vocab_size)
    config = _config(workload, samples)
    engine = TrainEngine(model, config, Ledger(), num_updates=100)
    flops, num_slots = _forward_flops(engine, config, samples)
    timer = _Timer(device, workload.num_repeats)
    first_s = timer.once(lambda: _gradients(engine, samples))
    gradients = timer.steady(lambda: _gradients(engine, samples))
    figures: dict[str, Any] = {
        "workload": workload.model,
        "settings": _settings(workload, fusion, device),
        "num_samples": len(samples),
        "num_tokens": sum(sample.num_tokens for sample in samples),
        "num_slots": num_slots,
        "forward_backward": _rates(gradients, 3 * flops, samples, model),
        "compile_s": max(0.0, first_s - gradients["median_s"]),
    }
    forward = timer.steady(lambda: engine.score(samples, "old_logprob"))
    figures["score"] = _rates(forward, flops, samples, model)
    if workload.with_optimizer:
        update = timer.steady(lambda: engine.update(samples, MetricAccumulator()))
        figures["update_actor"] = _rates(update, 3 * flops, samples, model)
        rest = update["median_s"] - gradients["median_s"]
        figures["update_actor"]["outside_forward_backward_share"] = rest / update["median_s"]
    if device.type == "cuda":
        run = engine.update if workload.with_optimizer else None
        figures["kernel_ms"] = time_by_class(
            lambda: _gradients(engine, samples) if run is None else run(samples, MetricAccumulator())
        )
    return {**figures, **_environment(device, model)}


def _model(workload: TrainWorkload, device: torch.device) -> tuple[CausalModel, FusionOutcome]:
    config = shape_config(workload.model)
    torch.manual_seed(0)
    with device:
        module = AutoModelForCausalLM.from_config(config, dtype=resolve_dtype("auto", device))
    model = wrap_model(module, device, check_family(config, type(module)))
    if workload.preset == "plain":
        return model, FusionOutcome(0, "train.preset: plain")
    return model, fuse_for_device(module, device)


def _samples(workload: TrainWorkload, vocab_size: int) -> list[TrainSample]:
    rng = np.random.default_rng(0)
    pairs: list[tuple[int, list[int], int]] = []
    if workload.group is None:
        left = workload.num_tokens
        while left:
            length = min(left, int(rng.integers(256, 1792)))
            length = length if left - length >= 2 or left == length else left
            pairs.append((len(pairs), rng.integers(0, vocab_size, 1).tolist(), length - 1))
            left -= length
    else:
        prompt_tokens, num_samples, response_tokens = workload.group
        slots = prompt_tokens + num_samples * response_tokens  # groups as many as fit when prompts are shared
        for group in range(max(1, workload.num_tokens // slots)):
            prompt = rng.integers(0, vocab_size, prompt_tokens).tolist()
            pairs += [(group, prompt, response_tokens)] * num_samples
    return [
        TrainSample(
            prompt_id=str(group),
            prompt_ids=tuple(prompt),
            response_ids=tuple(rng.integers(0, vocab_size, length).tolist()),
            loss_mask=np.ones(length, dtype=np.float32),
            advantages=np.full(length, rng.normal(), dtype=np.float32),
            rollout_logprobs=np.full(length, -np.log(vocab_size), dtype=np.float32),
        )
        for group, prompt, length in pairs
    ]


def _config(workload: TrainWorkload, samples: list[TrainSample]) -> Config:
    total = sum(sample.num_tokens for sample in samples)
    # shared prompts count once towards the budget; one budget for both layouts would compare unequal work
    budget = max(workload.num_tokens, max(sample.num_tokens for sample in samples))
    budget = budget if workload.share_prefixes or workload.group is None else total
    return load_config(
        None,
        sections={
            "model": {"path": workload.model, "random_weights": True},
            "task": {"path": "none.jsonl"},
            "rollout": {"max_new_tokens": max(len(sample.response_ids) for sample in samples)},
            "batch": {
                "token_budget": budget,
                "forward_token_budget": budget,
                "share_prefixes": workload.share_prefixes,
            },
            "train": {
                "preset": workload.preset,
                "lr": 1e-6,
                "gradient_checkpointing": workload.recompute,
                "selective_keep": workload.selective_keep,
                "logprob_chunk": workload.logprob_chunk,
            },
        },
    )


def _gradients(engine: TrainEngine, samples: list[TrainSample]) -> None:
    """Forward and backward of the whole mini-batch; the gradients are dropped."""
    engine.accumulate(samples)
    engine.optimizer.zero_grad()


def _forward_flops(engine: TrainEngine, config: Config, samples: list[TrainSample]) -> tuple[float, int]:
    """FLOPs of one forward pass over the samples *as they are asked for*, and the positions really computed.

    Where a prompt is shared, the work that sharing saves is not credited: slots are what was computed.
    """
    model, batch = engine.model, config.batch
    plan = plan_batch(samples, batch, batch.token_budget, cost_of(model.shape))
    flops, num_slots = 0.0, 0
    for row in plan.rows:
        micro_batch = build_micro_batch(samples, row, batch, model.device)
        flops += forward_flops(model.shape, micro_batch.segments, micro_batch.num_response_tokens)
        num_slots += micro_batch.num_slots
    return flops, num_slots


@dataclass(frozen=True, slots=True)
class _Timer:
    device: torch.device
    num_repeats: int

    def once(self, work: Callable[[], object]) -> float:
        """Seconds of one call, first-use work included."""
        started = time.perf_counter()
        work()
        self._wait()
        return time.perf_counter() - started

    def steady(self, work: Callable[[], object]) -> dict[str, float]:
        """Median over three rounds of the mean time of `num_repeats` calls in a row, and the memory peak."""
        work()
        self._wait()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        rounds = []
        for _ in range(3):
            started = time.perf_counter()
            for _ in range(self.num_repeats):
                work()
            self._wait()
            rounds.append((time.perf_counter() - started) / self.num_repeats)
        found = {"median_s": float(np.median(rounds)), "spread_s": max(rounds) - min(rounds)}
        if self.device.type == "cuda":
            found["peak_gib"] = torch.cuda.max_memory_allocated(self.device) / GIB
        return found

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _rates(
    timing: dict[str, float], flops: float, samples: list[TrainSample], model: CausalModel
) -> dict[str, float | None]:
    seconds = timing["median_s"]
    name = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else None
    peak = known_peak_tflops(name, str(model.dtype).removeprefix("torch."), None)
    tflops = flops / seconds / 1e12
    return {
        **timing,
        "tokens_per_s": sum(sample.num_tokens for sample in samples) / seconds,
        "tflops": tflops,
        "mfu": None if peak is None else tflops / peak,
    }


def _settings(workload: TrainWorkload, fusion: FusionOutcome, device: torch.device) -> dict[str, Any]:
    kernel = kernel_for(device)
    return {
        "preset": workload.preset,
        "fused_layers": fusion.num_layers,
        "not_fused_because": fusion.reason,
        "attention": "pieces" if kernel is None else kernel.name,
        "gradient_checkpointing": workload.recompute,
        "selective_keep": workload.selective_keep if workload.recompute == "selective" else None,
        "logprob_chunk": workload.logprob_chunk,
        "group": workload.group,
        "share_prefixes": workload.share_prefixes,
    }


def _environment(device: torch.device, model: CausalModel) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": package_versions(),
    }
