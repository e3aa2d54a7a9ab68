"""What the ranks run in tests of a critic over many ranks: the same updates as one rank, on any mesh."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from parallel_cases import Case, mesh_of, reduced, samples, settings
from tiny_models import FAMILIES
from transformers import AutoModelForSequenceClassification

from paceline.engine.critic import CriticEngine
from paceline.engine.samples import TrainSample
from paceline.engine.shards import full_tensor
from paceline.model.families import check_family
from paceline.model.loading import wrap_model
from paceline.model.value_head import ValueModel, as_value_model
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator


def tiny_critic(case: Case) -> ValueModel:
    """The family's tiny decoder with a scalar head that says something."""
    config = copy.deepcopy(FAMILIES[case.family])
    config.num_labels = 1
    torch.manual_seed(0)
    module = AutoModelForSequenceClassification.from_config(config, dtype=case.dtype)
    torch.nn.init.normal_(module.score.weight, std=0.3)
    with torch.no_grad():
        for parameter in module.base_model.parameters():
            if parameter.dim() >= 2:
                parameter *= 0.5
    model = wrap_model(module, torch.device("cpu"), check_family(config, type(module)))
    return as_value_model(model, head_is_new=False)


def with_returns(seed: int) -> list[TrainSample]:
    """Samples with values and returns, and a first token that the policy did not choose."""
    generator = np.random.default_rng(100 + seed)
    found = []
    for sample in samples(seed):
        mask = sample.loss_mask.copy()
        mask[0] = 0.0
        values, returns = (generator.normal(size=len(mask)).astype(np.float32) for _ in range(2))
        found.append(replace(sample, loss_mask=mask, values=values, returns=returns))
    return found


def critic_updated(case: Case) -> dict[str, Any]:
    """Values before and after two updates, their metrics, and whole parameters after them."""
    mesh = mesh_of(case.sizes)
    engine = CriticEngine(tiny_critic(case), settings(case.sections), Ledger(), mesh)
    before = engine.with_values(samples())
    history = []
    for seed in range(case.num_updates):
        metrics = MetricAccumulator()
        engine.update(with_returns(seed), metrics)
        history.append(reduced(mesh, metrics))
    optimizer = engine.optimizer
    return {
        "before": np.concatenate([sample.values for sample in before]),
        "after": np.concatenate([sample.values for sample in engine.with_values(samples())]),
        "metrics": history,
        "parameters": {
            name: full_tensor(master).float().clone() for name, master in optimizer.masters().items()
        },
        "state": optimizer.state(),
    }


def critics_updated(cases: list[Case]) -> list[dict[str, Any]]:
    return [critic_updated(case) for case in cases]
