"""Replicas over a simulated slow link: bytes, step time, and the loss after 200 steps of a toy task against exact sync.

usage: python benchmarks/gradient_sync.py [--json FILE] [--megabytes-per-s 25] [--steps 200] [--seeds 5]

Two processes on gloo, each a replica with half of every batch, run the very `CompressedSync` and `LocalSteps` that
training uses. The link is *simulated*: whoever sends sleeps for the bytes it sends over the stated bandwidth (both
directions at once, no latency, no packet loss); what gloo itself takes on one machine is part of the measured time and
small beside it. The toy task is a student network that learns a random teacher's classes from fresh samples: it says
whether an optimisation goes astray, not what a language model would do. Intervals are two-sided 95 % t intervals of
paired differences over seeds.
"""

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.engine.gradient_sync.compression import Compressor, Int8, TopK
from paceline.engine.gradient_sync.exchange import ring_bytes
from paceline.engine.gradient_sync.replicas import CompressedSync, LocalSteps
from paceline.telemetry.environment import cpu_model, package_versions

NUM_REPLICAS = 2
T_95 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Quantile 0.975 of Student's t by degrees of freedom."""

INPUTS, HIDDEN, CLASSES, BATCH = 64, 256, 16, 128


@dataclass(frozen=True, slots=True)
class Method:
    """How replicas agree. `compressor` None: exact; with `every` above 1: local steps."""

    name: str
    compressor: Compressor | None = None
    every: int = 1


METHODS = (
    Method("exact"),
    Method("int8", Int8()),
    Method("topk 10 %", TopK(0.1)),
    Method("topk 1 %", TopK(0.01)),
    Method("topk 10 % in int8", TopK(0.1, in_int8=True)),
    Method("topk 1 % in int8", TopK(0.01, in_int8=True)),
    Method("local steps, every 4", every=4),
    Method("local steps, every 8", every=8),
)


class SlowLink:
    """Sleeps for what is sent, and counts it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self.num_bytes = 0

    def send(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        time.sleep(num_bytes / self._bytes_per_s)


class OverLink:
    """A compressor whose payloads go over the link when they are made."""

    def __init__(self, inner: Compressor, link: SlowLink) -> None:
        self._inner, self._link = inner, link

    def encode(self, gradient_N: Tensor) -> Tensor:
        payload_P = self._inner.encode(gradient_N)
        self._link.send(len(payload_P) * (NUM_REPLICAS - 1))
        return payload_P

    def decode(self, payload_P: Tensor, num_elements: int) -> Tensor:
        return self._inner.decode(payload_P, num_elements)

    def num_bytes(self, num_elements: int) -> int:
        return self._inner.num_bytes(num_elements)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one seed: held-out loss in nats after the last step, mean milliseconds and bytes of a step."""

    loss: float
    step_ms: float
    bytes_per_step: float


class Agreement:
    """Hooks for every layer of the student, and what happens after its optimiser's step."""

    def __init__(self, method: Method, link: SlowLink, layers: list[nn.Module]) -> None:
        group = dist.group.WORLD
        assert group is not None
        self._link, self._local = link, LocalSteps(method.every, group) if method.every > 1 else None
        self._compressed = None
        if method.compressor is not None:
            self._compressed = CompressedSync(OverLink(method.compressor, link), group)
        maker: Callable[[], Callable[[Tensor], None]] = lambda: self._exact  # noqa: E731
        if self._local is not None:
            maker = self._local.hook
        elif self._compressed is not None:
            maker = self._compressed.hook
        self._hooks = [(list(layer.parameters()), maker()) for layer in layers]

    def _exact(self, gradient_N: Tensor) -> None:
        dist.all_reduce(gradient_N)
        self._link.send(ring_bytes(len(gradient_N), NUM_REPLICAS))

    def reduce(self) -> None:
        """Every layer's gradient through its hook, as FSDP hands over a part's flat gradient."""
        for parameters, hook in reversed(self._hooks):
            gradients = [p.grad for p in parameters if p.grad is not None]
            flat_N = torch.cat([gradient.flatten() for gradient in gradients])
            hook(flat_N)
            for gradient, part in zip(gradients, flat_N.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def after_step(self, state: Callable[[], list[Tensor]]) -> None:
        """The end of an update."""
        if self._compressed is not None:
            self._compressed.end_update(True, state)
        if self._local is not None:
            self._link.send(self._local.end_update(True, state).num_bytes)


def student() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, CLASSES)
    )


def train(method: Method, seed: int, num_steps: int, bytes_per_s: float) -> Outcome:
    """One run; the same data, teacher and start for all methods of a seed."""
    torch.manual_seed(1000 + seed)
    teacher, model = student(), student()
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter *= 3.0  # a start's scale would make the teacher's classes nearly equal
    data = torch.Generator().manual_seed(seed)
    link = SlowLink(bytes_per_s)
    agreement = Agreement(method, link, [layer for layer in model if isinstance(layer, nn.Linear)])
    adam = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)

    def state() -> list[Tensor]:
        moments = [adam.state[p][name] for p in model.parameters() for name in ("exp_avg", "exp_avg_sq")]
        return [*(p.detach() for p in model.parameters()), *moments]

    def batch(size: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(size, INPUTS, generator=data)
        with torch.no_grad():
            return inputs, teacher(inputs).argmax(dim=-1)

    held_out = batch(4096)
    own = slice(dist.get_rank(), None, NUM_REPLICAS)
    seconds = []
    for _ in range(num_steps):
        inputs, labels = batch(BATCH)
        dist.barrier()
        started = time.perf_counter()
        # a partial sum over the denominator of both replicas
        loss = F.cross_entropy(model(inputs[own]), labels[own], reduction="sum") / BATCH
        model.zero_grad()
        loss.backward()
        agreement.reduce()
        adam.step()
        agreement.after_step(state)
        seconds.append(time.perf_counter() - started)
    with torch.no_grad():
        final = float(F.cross_entropy(model(held_out[0]), held_out[1]))
    return Outcome(final, 1e3 * statistics.mean(seconds[num_steps // 20 :]), link.num_bytes / num_steps)


def replica(rank: int, store: str, options: argparse.Namespace, answers: Any) -> None:
    """One process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=NUM_REPLICAS)
    bytes_per_s = options.megabytes_per_s * 1e6
    outcomes = {
        method.name: [train(method, seed, options.steps, bytes_per_s) for seed in range(options.seeds)]
        for method in METHODS
    }
    if rank == 0:
        answers.put(outcomes)
    dist.barrier()
    dist.destroy_process_group()


def summary(outcomes: list[Outcome], exact: list[Outcome]) -> dict[str, Any]:
    """Means over seeds; the loss as a paired difference to exact sync with its interval."""
    differences = [mine.loss - theirs.loss for mine, theirs in zip(outcomes, exact, strict=True)]
    half = T_95[len(differences) - 1] * statistics.stdev(differences) / math.sqrt(len(differences))
    middle = statistics.mean(differences)
    return {
        "bytes_per_step": statistics.mean(outcome.bytes_per_step for outcome in outcomes),
        "step_ms": statistics.mean(outcome.step_ms for outcome in outcomes),
        "loss": statistics.mean(outcome.loss for outcome in outcomes),
        "loss_minus_exact": middle,
        "loss_minus_exact_95": [middle - half, middle + half],
        "by_seed": [asdict(outcome) for outcome in outcomes],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--megabytes-per-s", type=float, default=25.0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5, choices=range(3, 11))
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        answers = context.SimpleQueue()
        processes = [
            context.Process(target=replica, args=(rank, f"{folder}/store", options, answers))
            for rank in range(NUM_REPLICAS)
        ]
        for process in processes:
            process.start()
        outcomes = answers.get()
        for process in processes:
            process.join()
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_model(),
        "versions": package_versions(),
        "link": {"simulated": True, "megabytes_per_s": options.megabytes_per_s},
        "num_parameters": sum(p.numel() for p in student().parameters()),
        "num_steps": options.steps,
        "num_seeds": options.seeds,
        "methods": {name: summary(found, outcomes["exact"]) for name, found in outcomes.items()},
    }
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{'':22}{'bytes/step':>12}{'ms/step':>9}{'loss':>8}   minus exact, 95 %")
    for name, row in result["methods"].items():
        low, high = row["loss_minus_exact_95"]
        print(
            f"{name:22}{row['bytes_per_step']:12,.0f}{row['step_ms']:9.2f}{row['loss']:8.4f}"
            f"   {row['loss_minus_exact']:+.4f} [{low:+.4f}, {high:+.4f}]"
        )


if __name__ == "__main__":
    main()
