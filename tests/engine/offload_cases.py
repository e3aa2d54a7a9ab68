"""What ranks run with weights and optimiser states on the host."""

import numpy as np
from parallel_cases import Case, mesh_of, samples, settings, softened
from torch import Tensor

from paceline.config.parallelism import MeshSizes
from paceline.engine.model_engine import ModelEngine
from paceline.engine.shards import full_tensor, local_part
from paceline.engine.trainer import TrainEngine
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator


def parked_reference(sizes: MeshSizes, offload: bool) -> tuple[np.ndarray, np.ndarray, int]:
    """Scores of a reference, twice, and the bytes of its parameters that stay on the device in between."""
    config, mesh = settings({"train": {"param_offload": offload}}), mesh_of(sizes)
    engine = TrainEngine(softened(Case()), config, Ledger(), 9, mesh)
    reference = ModelEngine(softened(Case()), config.train, config.batch, Ledger(), None, mesh=mesh)
    scores = [np.concatenate(engine.score(samples(), "ref_logprob", reference)) for _ in range(2)]
    left = sum(local_part(p).untyped_storage().nbytes() for p in reference.model.module.parameters())
    return scores[0], scores[1], left


def trained_states(sizes: MeshSizes, offload: bool) -> dict[str, Tensor]:
    """Whole masters and moments after two updates."""
    config = settings({"train": {"optimizer_offload": offload}})
    engine = TrainEngine(softened(Case()), config, Ledger(), 9, mesh_of(sizes))
    for seed in range(2):
        engine.update(samples(seed), MetricAccumulator())
    states = engine.optimizer.masters() | engine.optimizer.moments()
    return {name: full_tensor(state).clone() for name, state in states.items()}
