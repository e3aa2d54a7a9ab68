"""What the ranks run in tests of many ranks: the same updates as one rank, on any mesh."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tiny_models import tiny_model

from paceline.config import load_config
from paceline.config.parallelism import MeshSizes
from paceline.config.schema import Config, LoraSection
from paceline.engine.mesh import RankMesh
from paceline.engine.samples import TrainSample
from paceline.engine.sharding import unsharded
from paceline.engine.shards import full_tensor
from paceline.engine.trainer import TrainEngine
from paceline.model.fused import fuse_layers
from paceline.model.fused.reference import ReferenceElementwise
from paceline.model.loading import CausalModel
from paceline.model.lora import AdaptedModel, add_adapters
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator

HEADER = tuple(range(5, 25))


@dataclass(frozen=True)
class Case:
    """One row of the invariance table."""

    family: str = "llama"
    sizes: MeshSizes = field(default_factory=MeshSizes)
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    num_updates: int = 2
    with_adapters: bool = False
    is_fused: bool = False


def settings(sections: dict[str, dict[str, Any]]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "model": {"path": "tiny"},
        "task": {"path": "prompts.jsonl"},
        "algorithm": {"name": "grpo", "kl_coefficient": 0.1, "entropy_coefficient": 0.01},
        "batch": {"num_prompts": 3, "num_samples": 2, "token_budget": 128},
        "rollout": {"max_new_tokens": 8},
        # eps of the gradients' size: Adam's first step is else the sign of the gradient, and signs of zeros are noise
        "train": {"lr": 1e-2, "eps": 1e-2, "logprob_chunk": 64},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return load_config(None, sections=base)


def samples(seed: int = 0, num_prompts: int = 3, num_samples: int = 2) -> list[TrainSample]:
    generator = np.random.default_rng(seed)
    found = []
    for prompt in range(num_prompts):
        prompt_ids = (*HEADER, *generator.integers(3, 90, 2 + prompt).tolist())
        for _ in range(num_samples):
            length = int(generator.integers(2, 8))
            found.append(
                TrainSample(
                    f"p{prompt}",
                    prompt_ids,
                    tuple(generator.integers(3, 90, length).tolist()),
                    np.ones(length, dtype=np.float32),
                    np.full(length, generator.normal(), dtype=np.float32),
                    generator.normal(-2, 0.1, length).astype(np.float32),
                    generator.normal(-2, 0.3, length).astype(np.float32),
                    generator.normal(-2, 0.3, length).astype(np.float32),
                )
            )
    return found


@cache  # gloo's threads outlive a group and poll: hundreds of meshes in one process slow the whole machine down
def mesh_of(sizes: MeshSizes) -> RankMesh:
    return RankMesh.from_process_group(sizes, "cpu") if dist.is_initialized() else RankMesh.single()


def reduced(mesh: RankMesh, metrics: MetricAccumulator) -> dict[str, float]:
    together = MetricAccumulator()
    for part in mesh.gather_objects(metrics):
        together.merge(part)
    return together.reduce()


def softened(case: Case) -> CausalModel:
    """The family's tiny model with half its weights: at full size, rounding alone moves a gradient norm by 1e-5."""
    model = tiny_model(case.family, case.dtype)
    with torch.no_grad():
        for parameter in model.module.parameters():
            if parameter.dim() >= 2:
                parameter *= 0.5
    if case.is_fused:
        assert fuse_layers(model.module, ReferenceElementwise(), adjacent=False).num_layers
    return add_adapters(model, LoraSection(rank=2), "base", seed=7) if case.with_adapters else model


def updated(case: Case, batches: list[list[TrainSample]] | None = None) -> dict[str, Any]:
    """Metrics of every update, scores and whole parameters after them."""
    mesh = mesh_of(case.sizes)
    engine = TrainEngine(softened(case), settings(case.sections), Ledger(), case.num_updates, mesh)
    before = engine.score(samples(), "old_logprob")
    history = []
    for batch in batches or [samples(seed) for seed in range(case.num_updates)]:
        metrics = MetricAccumulator()
        engine.update(batch, metrics)
        history.append(reduced(mesh, metrics))
    optimizer = engine.optimizer
    parameters = {name: full_tensor(master).clone() for name, master in optimizer.masters().items()}
    with unsharded(engine.engine.sharded) as view:
        gathered = {name: p.detach().float().clone() for name, p in view.module.named_parameters()}
        alone = TrainEngine(view, settings(case.sections), Ledger(), 1).score(samples(), "old_logprob")
    reference = engine.model.without_adapters() if isinstance(engine.model, AdaptedModel) else None
    return {
        "reference": np.concatenate(engine.score(samples(), "ref_logprob", reference)),
        "before": np.concatenate(before),
        "after": np.concatenate(engine.score(samples(), "old_logprob")),
        "gathered_scores": np.concatenate(alone),
        "metrics": history,
        "parameters": parameters,
        "gathered": gathered,
        "state": optimizer.state(),
    }


def updated_all(cases: list[Case]) -> list[dict[str, Any]]:
    return [updated(case) for case in cases]


_OF_THE_LAYOUT = {
    "memory/token_budget",
    "micro_batches",
    "micro_batches/no_op",
    "tokens/laid_out",
    "tokens/effective_share",
    "tokens/padding",
    "batch/distinct_shapes",
    "batch/new_shapes",
}


def comparable(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics that say the same on every mesh: not how tokens were laid out, nor what replicas exchanged."""
    return {
        name: value
        for name, value in metrics.items()
        if name.removeprefix("critic/") not in _OF_THE_LAYOUT and "gradient_sync/" not in name
    }
