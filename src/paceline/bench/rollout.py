"""`paceline bench rollout`: the native engine on fixed workloads, with random weights and forced lengths.

Beside the seconds stands the least time the same work can take on this device: decoding reads the weights once per step
and every sample's keys and values once per token, at the speed of a large copy measured in the same run; computing the
prompts takes their FLOPs at the device's peak (nothing is counted for them where the peak is not known).

Workloads, at full size:
    group     64 prompts x 8 samples, 256 tokens in, 512 out
    tail      the same 512 samples with the lengths of `tail_lengths.json` (exp(N(5.5, 0.8)) clipped to 16 .. 1536)
    uniform   256 samples that decode together around a context of 512 and of 1024 tokens: steady steps only
"""

import datetime
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from paceline.bench.bandwidth import copy_bandwidth, decode_traffic, wait
from paceline.bench.equality import logprob_differences
from paceline.bench.shapes import shape_config
from paceline.model.exact import make_exact
from paceline.model.families import check_family
from paceline.model.fused import fuse_for_device
from paceline.model.loading import CausalModel, resolve_device, resolve_dtype, wrap_model
from paceline.rollout import NativeEngine, PagedEngine, RolloutRequest, SamplingParams
from paceline.rollout.native.choice import CacheKind, engine_features, open_native_engine
from paceline.rollout.native.engine import EngineLimits
from paceline.rollout.native.paged.device_runner import DeviceRunner
from paceline.telemetry.environment import package_versions
from paceline.telemetry.flops import ModelShape, forward_flops
from paceline.telemetry.hardware import known_peak_tflops
from paceline.telemetry.ledger import Ledger
from paceline.types import Prompt

WorkloadName = Literal["group", "tail", "uniform"]
PARAMS = SamplingParams(1.0, frozenset(), ignore_stop=True)
_STEADY_CONTEXTS = (512, 1024)
_STEADY_STEPS = 48
_PREFILL_TOKENS = 16_384
"""Of a round."""


class NoText:
    """Stands for a tokenizer: the benchmark's tokens are random and nobody reads them."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """No text."""
        return ""


@dataclass(frozen=True, slots=True)
class RolloutBench:
    """What is run. `shrink` divides counts and lengths, to see on any machine that the benchmark runs."""

    model: str
    workload: WorkloadName
    cache: CacheKind = "auto"
    exact: bool = False
    num_repeats: int = 2
    shrink: int = 1


def bench_rollout(bench: RolloutBench) -> dict[str, Any]:
    """Runs the workload and returns its figures with everything they depend on. Seconds unless a name says else."""
    device = resolve_device("auto")
    began = time.perf_counter()
    model = _model(bench, device)
    wait(device)
    built_s = time.perf_counter() - began
    engine = _engine(bench, model)
    bandwidth = copy_bandwidth(device)
    startup = _start_up(engine, bench, device)
    run = _steady if bench.workload == "uniform" else _whole
    return {
        "workload": bench.workload,
        "model": bench.model,
        "shrink": bench.shrink,
        "exact": bench.exact,
        "copy_tb_per_s": bandwidth / 1e12,
        "model_built_s": built_s,
        "startup_s": sum(startup.values()),
        "startup": startup,
        "engine": {**engine_features(engine), **_captured(engine)},
        **run(bench, engine, model, bandwidth),
        "logprob_difference": _equality(bench, engine, model),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": package_versions(),
    }


def _model(bench: RolloutBench, device: torch.device) -> CausalModel:
    config = shape_config(bench.model)
    torch.manual_seed(0)
    with device:
        module = AutoModelForCausalLM.from_config(config, dtype=resolve_dtype("auto", device))
    model = wrap_model(module, device, check_family(config, type(module)))
    if bench.exact:
        make_exact(model)
    else:
        fuse_for_device(module, device)
    return model


def _engine(bench: RolloutBench, model: CausalModel) -> NativeEngine | PagedEngine:
    limits = EngineLimits(max_running=max(1, 512 // bench.shrink), prefill_token_budget=_PREFILL_TOKENS)
    cache: CacheKind = "paged" if bench.exact else bench.cache
    return open_native_engine(model, NoText(), cache, limits, Ledger())  # type: ignore[arg-type]


def _start_up(
    engine: NativeEngine | PagedEngine, bench: RolloutBench, device: torch.device
) -> dict[str, float]:
    """Seconds from an engine to one that is ready: the cache, kernels (compiled with the largest and the smallest
    batch), the other batch sizes' captures, and first rounds, which compile what prefill needs."""
    requests = _requests(bench, vocabulary=256)
    few = [replace(request, max_new_tokens=min(4, request.max_new_tokens)) for request in requests]
    parts: dict[str, float] = {}
    began = time.perf_counter()

    def note(part: str) -> None:
        nonlocal began
        wait(device)
        now = time.perf_counter()
        parts[part], began = now - began, now

    if isinstance(engine, PagedEngine):
        engine.reserve(requests)
        note("cache_s")
        if isinstance(engine.runner, DeviceRunner) and engine.runner.is_captured:
            with torch.inference_mode():
                engine.runner.capture((engine.runner.sizes[-1], engine.runner.sizes[0]))
                note("kernels_s")
                engine.runner.capture()
                note("captures_s")
    engine.generate(few, PARAMS)
    note("first_rounds_s")
    return parts


def _captured(engine: NativeEngine | PagedEngine) -> dict[str, Any]:
    if isinstance(engine, PagedEngine) and isinstance(engine.runner, DeviceRunner):
        return {"captured_sizes": list(engine.runner.captured_sizes)}
    return {}


def _requests(bench: RolloutBench, vocabulary: int) -> list[RolloutRequest]:
    """The workload's requests: groups of samples of one length, and of the tail one request per sample."""
    num_prompts, num_samples = max(1, 64 // bench.shrink), 8
    prompt_tokens, new_tokens = max(2, 256 // bench.shrink), max(2, 512 // bench.shrink)
    rng = np.random.default_rng(0)
    prompts = [
        Prompt(str(index), tuple(rng.integers(0, vocabulary, prompt_tokens).tolist()), "")
        for index in range(num_prompts)
    ]
    if bench.workload != "tail":
        return [
            RolloutRequest(prompt, tuple(range(i * num_samples, (i + 1) * num_samples)), new_tokens)
            for i, prompt in enumerate(prompts)
        ]
    lengths = json.loads(files("paceline.bench").joinpath("tail_lengths.json").read_text())
    return [
        RolloutRequest(
            prompts[i // num_samples], (i,), max(2, lengths[i] // bench.shrink)
        )  # limits differ within a group, so every sample is a request; pages of the prompt are shared all the same
        for i in range(num_prompts * num_samples)
    ]


def _whole(
    bench: RolloutBench, engine: NativeEngine | PagedEngine, model: CausalModel, bandwidth: float
) -> dict[str, Any]:
    """Everything from the first prompt to the last token, `num_repeats` times; each repeat has prompts of its own."""
    requests = _requests(bench, model.shape.vocab_size)
    samples = [
        (int(r.prompt.prompt_id), len(r.prompt.token_ids), r.max_new_tokens)
        for r in requests
        for _ in r.seeds
    ]
    repeats = []
    for _ in range(bench.num_repeats):
        prefill_s = _timed(engine, [replace(r, max_new_tokens=1) for r in requests], model.device)
        seconds = _timed(engine, requests, model.device)
        repeats.append((seconds, prefill_s))
    stats = engine.stats
    bound = _bound(model, engine, samples, stats.num_decode_steps, bandwidth)
    best = min(seconds for seconds, _ in repeats)
    return {
        "num_samples": len(samples),
        "generated_tokens": stats.num_generated_tokens,
        "decode_steps": stats.num_decode_steps,
        "prefill_tokens": stats.num_prefill_tokens,
        "preemptions": stats.num_preemptions,
        "cache_gib": stats.cache_bytes / 2**30,
        "seconds": [seconds for seconds, _ in repeats],
        "tokens_per_s": [stats.num_generated_tokens / seconds for seconds, _ in repeats],
        "stages": [{"prefill_s": p, "decode_s": s - p} for s, p in repeats],
        "bound": bound,
        "share_of_bound": bound["seconds"] / best,
    }


def _timed(
    engine: NativeEngine | PagedEngine, requests: Sequence[RolloutRequest], device: torch.device
) -> float:
    wait(device)
    began = time.perf_counter()
    engine.generate(requests, PARAMS)
    wait(device)
    return time.perf_counter() - began


def _bound(
    model: CausalModel,
    engine: NativeEngine | PagedEngine,
    samples: Sequence[tuple[int, int, int]],
    num_steps: int,
    bandwidth: float,
) -> dict[str, float]:
    """The least seconds: bytes over the measured bandwidth, and the prompts' FLOPs over the device's peak."""
    traffic = decode_traffic(model.shape, engine.layout, samples, num_steps)
    prompts = {group: prompt for group, prompt, _ in samples}
    flops = forward_flops(model.shape, [(length, 0) for length in prompts.values()], len(samples))
    name = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else None
    peak = known_peak_tflops(name, str(model.dtype).removeprefix("torch."), None)
    prefill_s = 0.0 if peak is None else flops / (peak * 1e12)
    weights_s, kv_s = traffic.weight_bytes / bandwidth, traffic.kv_bytes / bandwidth
    return {
        "seconds": weights_s + kv_s + prefill_s,
        "weights_s": weights_s,
        "kv_s": kv_s,
        "kv_prompts_once_s": traffic.kv_bytes_prompts_once / bandwidth,
        "prefill_s": prefill_s,
    }


def _steady(
    bench: RolloutBench, engine: NativeEngine | PagedEngine, model: CausalModel, bandwidth: float
) -> dict[str, Any]:
    """Seconds of one decoding step of 256 samples, in the middle of a run whose context passes 512 and 1024 tokens."""
    return {
        "contexts": [
            _steady_context(bench, engine, model, bandwidth, context) for context in _STEADY_CONTEXTS
        ]
    }


def _steady_context(
    bench: RolloutBench,
    engine: NativeEngine | PagedEngine,
    model: CausalModel,
    bandwidth: float,
    full_context: int,
) -> dict[str, Any]:
    num_samples, context = max(1, 256 // bench.shrink), max(8, full_context // bench.shrink)
    num_steps = min(_STEADY_STEPS, context // 2)
    prompt_tokens = context - num_steps // 2
    # those whose prompts come first draw while the others' are computed, and must not end before the last step
    new_tokens = num_steps + 12 + num_samples * prompt_tokens // _PREFILL_TOKENS
    rng = np.random.default_rng(1)
    step_s = []
    for repeat in range(bench.num_repeats + 1):
        for sample in range(num_samples):
            tokens = tuple(rng.integers(0, model.shape.vocab_size, prompt_tokens).tolist())
            prompt = Prompt(f"{repeat}-{sample}", tokens, "")
            engine.submit(RolloutRequest(prompt, (sample,), new_tokens), PARAMS)
        while engine.num_running < num_samples:
            engine.step()
        for _ in range(4):  # rounds under way, first use of a batch size
            engine.step()
        wait(model.device)
        before = engine.stats.num_decode_steps
        began = time.perf_counter()
        for _ in range(num_steps):
            engine.step()
        wait(model.device)
        step_s.append((time.perf_counter() - began) / (engine.stats.num_decode_steps - before))
        while engine.has_work:
            engine.step()
    weights = _weight_bytes(model.shape, model.dtype)
    kv = num_samples * context * engine.layout.bytes_per_token
    median = statistics.median(step_s[1:])
    bound_s = (weights + kv) / bandwidth
    return {
        "context": context,
        "num_samples": num_samples,
        "step_s": step_s[1:],
        "tokens_per_s": num_samples / median,
        "bound_s": bound_s,
        "share_of_bound": bound_s / median,
    }


def _equality(
    bench: RolloutBench, engine: NativeEngine | PagedEngine, model: CausalModel
) -> dict[str, float | int | bool]:
    """Log-probs of a few of the workload's samples against the trainer's scoring of the same tokens."""
    requests = _requests(bench, model.shape.vocab_size)[:4]
    groups = engine.generate(requests, PARAMS)
    return logprob_differences(model, requests, groups, PARAMS.temperature)


def _weight_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    return (shape.body_parameters + shape.head_parameters) * dtype.itemsize


def rollout_text(result: dict[str, Any]) -> str:
    """The figures as lines for a person."""
    lines = [
        f"{result['workload']} · {result['model']} · {result['device']} {result['dtype']} · "
        f"{result['engine']['rollout_cache']}, {result['engine']['rollout_attention']}",
        f"copy {result['copy_tb_per_s']:.2f} TB/s · model {result['model_built_s']:.1f} s · start-up "
        f"{result['startup_s']:.1f} s ("
        + ", ".join(f"{part.removesuffix('_s')} {took:.1f}" for part, took in result["startup"].items())
        + ")",
    ]
    for row in result.get("contexts", ()):
        lines.append(
            f"context {row['context']}: {row['tokens_per_s']:,.0f} tok/s, step "
            f"{statistics.median(row['step_s']) * 1e3:.2f} ms, {row['share_of_bound']:.2f} of the bandwidth bound"
        )
    apart = result["logprob_difference"]
    lines.append(
        f"log-probs against the trainer's: mean {apart['mean']:.1e}, largest {apart['max']:.1e} nats, "
        f"{apart['share_of_equal_bits']:.0%} the same bits"
    )
    if "seconds" in result:
        for seconds, rate, stage in zip(
            result["seconds"], result["tokens_per_s"], result["stages"], strict=True
        ):
            lines.append(f"{seconds:.2f} s, {rate:,.0f} tok/s (prefill {stage['prefill_s']:.2f} s)")
        lines.append(
            f"bound {result['bound']['seconds']:.2f} s: {result['share_of_bound']:.2f} of it reached · "
            f"{result['preemptions']} preemptions · cache {result['cache_gib']:.1f} GiB"
        )
    return "\n".join(lines)
