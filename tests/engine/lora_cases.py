"""What the ranks run in tests of adapters and supervised updates over many ranks."""

import math
from typing import Any

import numpy as np
import torch
from parallel_cases import Case, mesh_of, reduced, samples, settings, softened

from paceline.config import load_sft_config
from paceline.config.schema import LoraSection
from paceline.engine.sft import SftEngine, SftSample
from paceline.engine.sharding import unsharded
from paceline.engine.shards import full_tensor
from paceline.engine.trainer import TrainEngine
from paceline.model.loading import CausalModel
from paceline.model.lora import AdaptedModel, add_adapters
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator


def model_of(case: Case, lora: bool) -> CausalModel:
    """The softened model, with adapters whose B is not zero, so that both matrices have a gradient."""
    model = softened(case)
    if not lora:
        return model
    adapted = add_adapters(model, LoraSection(rank=4), "base", seed=3)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in adapted.module.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return adapted


def adapted_updates(case: Case) -> dict[str, Any]:
    """Policy updates of adapters: metrics, scores with and without them, adapters and merged weights afterwards."""
    mesh = mesh_of(case.sizes)
    engine = TrainEngine(model_of(case, lora=True), settings(case.sections), Ledger(), case.num_updates, mesh)
    reference = engine.model.without_adapters()
    # the reference is read first, as in a run: its pass must leave the adapters trainable
    before = engine.score(samples(), "ref_logprob", reference)
    history = []
    for seed in range(case.num_updates):
        metrics = MetricAccumulator()
        engine.update(samples(seed), metrics)
        history.append(reduced(mesh, metrics))
    after = engine.score(samples(), "ref_logprob", reference)
    with unsharded(engine.engine.sharded) as view:
        assert isinstance(view, AdaptedModel)
        merged = {name: tensor.float().clone() for name, tensor in view.merged_state_dict().items()}
        adapter = {name: tensor.float().clone() for name, tensor in view.adapter_state_dict().items()}
    return {
        "reference before": np.concatenate(before),
        "reference after": np.concatenate(after),
        "policy after": np.concatenate(engine.score(samples(), "old_logprob")),
        "metrics": history,
        "parameters": whole_masters(engine),
        "merged": merged,
        "adapter": adapter,
    }


def whole_masters(engine: TrainEngine | SftEngine) -> dict[str, torch.Tensor]:
    return {name: full_tensor(master).clone() for name, master in engine.optimizer.masters().items()}


def sft_rows(seed: int, num_rows: int = 5) -> list[SftSample]:
    generator = np.random.default_rng(seed)
    found = []
    for index in range(num_rows):
        prompt = tuple(generator.integers(3, 90, 20 + index).tolist())
        length = int(generator.integers(3, 9))
        mask = np.ones(length, dtype=np.float32)
        mask[1:-1] = generator.integers(0, 2, length - 2)
        found.append(SftSample(prompt, tuple(generator.integers(3, 90, length).tolist()), mask))
    return found


def supervised_updates(case: Case, lora: bool) -> dict[str, Any]:
    """Supervised updates: held-out loss before and after, metrics and parameters."""
    sections = {
        "model": {"path": "tiny"},
        "task": {"path": "rows.jsonl"},
        "batch": {"num_prompts": 5, "token_budget": 128, **case.sections.get("batch", {})},
        "train": {"lr": 1e-2, "eps": 1e-2, "logprob_chunk": 64, **case.sections.get("train", {})},
    }
    mesh = mesh_of(case.sizes)
    config = load_sft_config(None, sections=sections)
    engine = SftEngine(model_of(case, lora), config, Ledger(), case.num_updates, mesh)
    held_out = [engine.evaluate(sft_rows(9)).loss]
    history = []
    for seed in range(case.num_updates):
        metrics = MetricAccumulator()
        # one row in the second update: most ranks have none
        engine.update(sft_rows(seed, num_rows=5 if seed == 0 else 1), metrics)
        history.append(reduced(mesh, metrics))
    held_out.append(engine.evaluate(sft_rows(9)).loss)
    assert all(math.isfinite(loss) for loss in held_out)
    return {"held_out": held_out, "metrics": history, "parameters": whole_masters(engine)}
