"""`paceline bench padded`: what padding choices cost where kernels plan for every new shape, as cuDNN attention does.

The same samples go through `TrainEngine.score` and `.update` under each `batch.pad_to`, with as many rows in every
micro-batch, so that choices differ in their widths only. The first pass meets new shapes, repeats do not: the
difference is what first use costs. The same with FlashAttention, which plans nothing, says how much of it is the
attention's plans and how much is memory being reserved. What one long sample costs is measured apart.

CUDA runs attention on the stated back end, everything else as transformers has it (train.preset: plain), so that
nothing but attention plans by shape; a CPU has one back end, and shows that everything runs.
"""

import datetime
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, PretrainedConfig

from paceline.batching.padding import PadTo, bucket_width
from paceline.bench.shapes import shape_config
from paceline.config import Config, ConfigError, load_config
from paceline.engine.planning import cost_model as cost_of
from paceline.engine.planning import plan_batch
from paceline.engine.samples import TrainSample, num_tokens
from paceline.engine.trainer import TrainEngine
from paceline.model.families import check_family
from paceline.model.loading import CausalModel, resolve_device, resolve_dtype, wrap_model
from paceline.telemetry.environment import package_versions
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator

Backend = Literal["cudnn", "flash"]

_BACKENDS: dict[Backend, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
}
_CHOICES: tuple[PadTo, ...] = (
    "mini_batch",
    "bucket",
    "micro_batch",
)  # fewest shapes first: later ones reuse few


@dataclass(frozen=True, slots=True)
class PaddedWorkload:
    """`num_micro_batches` of `rows` samples; lengths in tokens, uniform between `shortest` and `longest`."""

    model: str = "qwen3-0.6b"
    num_micro_batches: int = 32
    rows: int = 2
    shortest: int = 768
    longest: int = 1536
    num_repeats: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.shortest <= self.longest:
            rule = f"must be at least 2 and at most --longest = {self.longest}"
            raise ConfigError("--shortest", self.shortest, rule, str(max(2, self.longest // 2)))


@dataclass(slots=True)
class _Bench:
    """A workload under way. `met` are the (pass, back end, rows, width) this process has computed before."""

    workload: PaddedWorkload
    config: PretrainedConfig
    device: torch.device
    met: set[tuple[str, str, int, int]] = field(default_factory=set)


def bench_padded(workload: PaddedWorkload) -> dict[str, Any]:
    """Runs the workload and returns its figures with everything they depend on. Seconds unless a name says else."""
    device = resolve_device("auto")
    config = shape_config(workload.model)
    bench = _Bench(workload, config, device)
    samples = _samples(workload, config.vocab_size)
    backends: tuple[Backend, ...] = ("cudnn", "flash") if device.type == "cuda" else ("cudnn",)
    figures: dict[str, Any] = {"workload": asdict(workload), "num_tokens": sum(map(num_tokens, samples))}
    with _attention(device, backends[0]):
        _warm_up(bench)
        figures["attention"] = _attention_plans(bench)
        figures["choices"] = {choice: _measure(bench, samples, choice, backends[0]) for choice in _CHOICES}
        figures["one_long_sample"] = _one_long_sample(bench, backends[0])
    for backend in backends[1:]:
        with _attention(device, backend):
            figures[f"{backend}_for_comparison"] = _measure(bench, samples, "micro_batch", backend)
    return {**figures, **_environment(device, backends[0])}


@contextmanager
def _attention(device: torch.device, backend: Backend) -> Iterator[None]:
    """Restricts attention to one back end on CUDA."""
    if device.type != "cuda":
        yield
        return
    with sdpa_kernel(_BACKENDS[backend]):
        yield


def _measure(bench: _Bench, samples: list[TrainSample], pad_to: PadTo, backend: Backend) -> dict[str, Any]:
    """First pass and repeats of forward-only scoring and of whole updates, on a model of its own."""
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()  # the choice before has freed its model; each pays for its own memory
    settings = _config(bench.workload, samples, pad_to)
    engine = TrainEngine(_model(bench), settings, Ledger(), num_updates=100)
    plan = plan_batch(samples, settings.batch, settings.batch.token_budget, cost_of(engine.model.shape))
    shapes = sorted({(row.num_rows, row.width) for row in plan.rows})
    num_slots = sum(row.num_rows * row.width for row in plan.rows)
    found: dict[str, Any] = {
        "num_micro_batches": len(plan.rows),
        "num_slots": num_slots,
        "tokens_per_slot": plan.num_tokens / num_slots,
        "distinct_shapes": len(shapes),
        "widths": [width for _, width in shapes],
    }
    passes: dict[str, Callable[[], object]] = {
        "old_logprob": lambda: engine.score(samples, "old_logprob"),
        "update_actor": lambda: engine.update(samples, MetricAccumulator()),
    }
    for name, run in passes.items():
        new = {(name, backend, *shape) for shape in shapes} - bench.met
        bench.met |= new
        found[name] = _first_and_repeat(bench, run, len(new))
    return found


def _first_and_repeat(bench: _Bench, run: Callable[[], object], num_new: int) -> dict[str, float]:
    first = _seconds(bench.device, run)
    repeats = [_seconds(bench.device, run) for _ in range(bench.workload.num_repeats)]
    repeat = statistics.median(repeats)
    return {
        "first_s": first,
        "repeat_s": repeat,
        "first_use_s": first - repeat,
        "new_shapes": num_new,
        "first_use_ms_per_new_shape": 1e3 * (first - repeat) / num_new if num_new else 0.0,
    }


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    _wait(device)
    started = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _attention_plans(bench: _Bench, num_widths: int = 6) -> dict[str, Any]:
    """One attention call, forward and backward, on widths that nothing else uses: milliseconds the first time and the
    next. All layers of a model share a shape, so a pass pays this once per new shape."""
    heads, kv_heads = bench.config.num_attention_heads, bench.config.num_key_value_heads
    dim, rows, dtype = bench.config.head_dim, bench.workload.rows, resolve_dtype("auto", bench.device)
    times: dict[str, list[float]] = {"first": [], "repeat": []}
    for number in range(num_widths + 1):
        width = bench.workload.longest + 8 * (number + 1)
        query, key, value = (
            torch.randn(rows, n, width, dim, device=bench.device, dtype=dtype, requires_grad=True)
            for n in (heads, kv_heads, kv_heads)
        )

        attend = partial(_attend, query, key, value)
        for name in times:
            times[name].append(1e3 * _seconds(bench.device, attend))
    # the first width also pays for the library's own start
    return {f"{name}_ms": statistics.median(values[1:]) for name, values in times.items()}


def _attend(query: Tensor, key: Tensor, value: Tensor) -> None:
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    out.sum().backward()


def _one_long_sample(bench: _Bench, backend: Backend) -> dict[str, Any]:
    """The case in which the mini-batch's maximum hurts: one sample of `longest`, all others about half as long."""
    workload = replace(bench.workload, num_micro_batches=max(2, bench.workload.num_micro_batches // 2))
    rng = np.random.default_rng(workload.seed + 1)
    usual = workload.longest // 2
    lengths = rng.integers(usual - usual // 16, usual + 1, workload.num_micro_batches * workload.rows)
    lengths[0] = workload.longest
    samples = _from_lengths(lengths.tolist(), bench.config.vocab_size, rng)
    found: dict[str, Any] = {
        choice: _measure(bench, samples, choice, backend) for choice in ("mini_batch", "micro_batch")
    }
    found["slots_ratio"] = found["mini_batch"]["num_slots"] / found["micro_batch"]["num_slots"]
    for name in ("old_logprob", "update_actor"):
        ratio = found["mini_batch"][name]["repeat_s"] / found["micro_batch"][name]["repeat_s"]
        found[f"{name}_repeat_ratio"] = ratio
    return found


def _warm_up(bench: _Bench) -> None:
    """Libraries load and handles are made before anything is timed, on a width that nothing else uses."""
    rng = np.random.default_rng(0)
    width = max(2, bench.workload.shortest // 2 - 1)
    samples = _from_lengths([width] * bench.workload.rows, bench.config.vocab_size, rng)
    engine = TrainEngine(
        _model(bench), _config(bench.workload, samples, "micro_batch"), Ledger(), num_updates=1
    )
    engine.score(samples, "old_logprob")
    engine.update(samples, MetricAccumulator())
    _wait(bench.device)


def _model(bench: _Bench) -> CausalModel:
    torch.manual_seed(0)
    with bench.device:
        module = AutoModelForCausalLM.from_config(bench.config, dtype=resolve_dtype("auto", bench.device))
    return wrap_model(module, bench.device, check_family(bench.config, type(module)))


def _samples(workload: PaddedWorkload, vocab_size: int) -> list[TrainSample]:
    """Lengths so far apart that nearly every micro-batch has its own maximum, and so close that padding to the longest
    costs a third; the longest is there once, so that the choices share it."""
    rng = np.random.default_rng(workload.seed)
    num = workload.num_micro_batches * workload.rows
    lengths = rng.integers(workload.shortest, workload.longest + 1, num)
    lengths[0] = workload.longest
    return _from_lengths(lengths.tolist(), vocab_size, rng)


def _from_lengths(lengths: list[int], vocab_size: int, rng: np.random.Generator) -> list[TrainSample]:
    """Samples of random tokens: a prompt of one token, so that nearly all tokens pass the head."""
    return [
        TrainSample(
            prompt_id=str(index),
            prompt_ids=tuple(rng.integers(0, vocab_size, 1).tolist()),
            response_ids=tuple(rng.integers(0, vocab_size, length - 1).tolist()),
            loss_mask=np.ones(length - 1, dtype=np.float32),
            advantages=np.full(length - 1, rng.normal(), dtype=np.float32),
            rollout_logprobs=np.full(length - 1, -np.log(vocab_size), dtype=np.float32),
        )
        for index, length in enumerate(lengths)
    ]


def _config(workload: PaddedWorkload, samples: list[TrainSample], pad_to: PadTo) -> Config:
    """The budget holds `rows` rows of the widest shape any choice makes, so that all choices have as many rows."""
    longest = max(map(num_tokens, samples))
    budget = workload.rows * bucket_width(longest)
    return load_config(
        None,
        sections={
            "model": {"path": workload.model, "random_weights": True},
            "task": {"path": "none.jsonl"},
            "rollout": {"max_new_tokens": longest - 1},
            "batch": {
                "layout": "padded",
                "pad_to": pad_to,
                "pad_rows": workload.rows,
                "token_budget": budget,
                "forward_token_budget": budget,
            },
            "train": {"lr": 1e-6, "preset": "plain"},
        },
    )


def _environment(device: torch.device, backend: Backend) -> dict[str, Any]:
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "attention_backend": backend if device.type == "cuda" else "the CPU's own",
        "dtype": str(resolve_dtype("auto", device)).removeprefix("torch."),
        "versions": package_versions(),
    }
