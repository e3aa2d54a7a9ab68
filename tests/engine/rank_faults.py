"""What the ranks run in tests of ranks that have little, nothing or something broken to do."""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from parallel_cases import Case, mesh_of, reduced, samples, settings, softened
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from paceline.algorithms.advantages import Advantages, compute_advantages
from paceline.config.parallelism import MeshSizes
from paceline.engine.model_engine import LossOutput, ModelEngine
from paceline.engine.optimizer import TooManySkippedUpdatesError
from paceline.engine.samples import TrainSample
from paceline.engine.shards import full_tensor, local_part, num_copies, part_of
from paceline.engine.trainer import TrainEngine
from paceline.model.inputs import score
from paceline.model.logprob_head import HeadSettings
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator


def sample(num_tokens: int, value: float = 1.0) -> TrainSample:
    """A prompt of one token and `num_tokens` - 1 response tokens, each of loss `value`."""
    length = num_tokens - 1
    return TrainSample(
        f"p{num_tokens}",
        (3,),
        tuple(range(4, 4 + length)),
        np.ones(length, dtype=np.float32),
        np.full(length, value, dtype=np.float32),
        np.zeros(length, dtype=np.float32),
    )


def unit_loss(sizes: MeshSizes, lengths: list[int], budget: int, layout: str) -> dict[str, Any]:
    """An update whose loss is the mean of each token's value (1.0), over all tokens of all ranks."""
    return valued_loss(sizes, [sample(length) for length in lengths], budget, layout)


def valued_loss(
    sizes: MeshSizes, batch: list[TrainSample], budget: int, layout: str = "packed"
) -> dict[str, Any]:
    mesh = mesh_of(sizes)
    batch_section = {"token_budget": budget, "layout": layout, "share_prefixes": False}
    config = settings({"batch": batch_section, "rollout": {"max_new_tokens": 4}})
    engine = ModelEngine(softened(Case()), config.train, config.batch, Ledger(), 1, mesh=mesh)
    head = HeadSettings(1.0, None, 4)
    num_tokens = sum(len(s.response_ids) for s in batch)

    def loss_of(values: tuple[Tensor, ...], members: Any) -> LossOutput:
        value_R = torch.from_numpy(np.concatenate([m.advantages for m in members]))
        # log-probs less their own value: the loss is `value` per token, the gradient that of the log-probs
        loss = (value_R * (1.0 + values[0] - values[0].detach())).sum() / num_tokens
        largest = float(max(len(m.response_ids) for m in members))
        return LossOutput(loss, {"loss/total": (float(loss.detach()), 1.0), "ratio/max": (largest, 1.0)})

    metrics = MetricAccumulator()
    engine.update(batch, "update_actor", lambda model, inputs: score(model, inputs, head), loss_of, metrics)
    masters = engine.optimizer.masters()
    return {**reduced(mesh, metrics), "parameters": {n: full_tensor(m).clone() for n, m in masters.items()}}


def nothing_to_train(sizes: MeshSizes) -> tuple[Any, dict[str, float], bool]:
    mesh = mesh_of(sizes)
    engine = TrainEngine(softened(Case()), settings({}), Ledger(), 1, mesh)
    before = {name: master.clone() for name, master in engine.optimizer.masters().items()}
    batch = [replace(s, loss_mask=np.zeros_like(s.loss_mask)) for s in samples()]
    metrics = MetricAccumulator()
    outcome = engine.update(batch, metrics)
    same = all(
        torch.equal(full_tensor(m), full_tensor(before[n])) for n, m in engine.optimizer.masters().items()
    )
    return outcome, reduced(mesh, metrics), same


def one_bad_sample(sizes: MeshSizes) -> dict[str, Any]:
    """Three updates, the second with one sample whose advantage is not a number; then two such in a row."""
    mesh = mesh_of(sizes)
    config = settings({"train": {"max_skipped_updates": 2}})
    engine = TrainEngine(softened(Case()), config, Ledger(), 9, mesh)
    bad = samples(1)
    bad[0] = replace(bad[0], advantages=np.full_like(bad[0].advantages, np.nan))
    history, states = [], []
    for batch in (samples(0), bad, samples(2), bad):
        before = {n: full_tensor(t).clone() for n, t in everything(engine).items()}
        metrics = MetricAccumulator()
        outcome = engine.update(batch, metrics)
        assert outcome is not None
        after = {n: full_tensor(t) for n, t in everything(engine).items()}
        unchanged = all(torch.equal(after[n], t) for n, t in before.items()) and len(before) == len(after)
        history.append((outcome.skipped, outcome.grad_norm, unchanged))
        states.append(reduced(mesh, metrics)["updates/skipped"])
    try:
        engine.update(bad, MetricAccumulator())
    except TooManySkippedUpdatesError as error:
        return {"history": history, "skipped": states, "stopped": str(error)}
    return {"history": history, "skipped": states, "stopped": None}


def everything(engine: TrainEngine) -> dict[str, Tensor]:
    return {**engine.optimizer.masters(), **engine.optimizer.moments()}


def whitened(shards: list[list[float | None]]) -> Advantages:
    mesh = mesh_of(MeshSizes(shard=len(shards)))

    def all_reduce(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(mesh.sum(torch.tensor(values, dtype=torch.float64)).tolist())

    own = shards[mesh.rank]
    return compute_advantages("batch_whiten", [own] if own else [], 1e-3, all_reduce)


def one_rank_dies(sizes: MeshSizes) -> str:
    """What the surviving rank sees when the other is killed before an update."""
    mesh = mesh_of(sizes)
    engine = TrainEngine(softened(Case()), settings({}), Ledger(), 9, mesh)
    if mesh.rank == 1:
        os._exit(1)
    try:
        engine.update(samples(), MetricAccumulator())
    except RuntimeError as error:
        return str(error)
    return "nothing happened"


def trained_state(sizes: MeshSizes) -> dict[str, Any]:
    """Whole masters, moments and counters after two updates."""
    mesh = mesh_of(sizes)
    engine = TrainEngine(softened(Case()), settings({}), Ledger(), 9, mesh)
    for seed in range(2):
        engine.update(samples(seed), MetricAccumulator())
    return {
        "masters": {n: full_tensor(t).clone() for n, t in engine.optimizer.masters().items()},
        "moments": {n: full_tensor(t).clone() for n, t in engine.optimizer.moments().items()},
        "state": engine.optimizer.state(),
    }


def continued(sizes: MeshSizes, saved: dict[str, Any]) -> dict[str, Any]:
    """The state right after loading, and after one more update."""
    mesh = mesh_of(sizes)
    engine = TrainEngine(softened(Case()), settings({}), Ledger(), 9, mesh)
    engine.score(samples(), "old_logprob")  # leaves gathered weights behind, which loading must not
    engine.optimizer.load(saved["masters"], saved["moments"], saved["state"])
    loaded = {n: full_tensor(t).clone() for n, t in everything(engine).items()}
    scores = np.concatenate(engine.score(samples(), "old_logprob"))
    engine.update(samples(2), MetricAccumulator())
    return {
        "loaded": loaded,
        "scores": scores,
        "after": {n: full_tensor(t).clone() for n, t in everything(engine).items()},
    }


def counted_work(sizes: MeshSizes) -> dict[str, float]:
    """What this rank's ledger counts of an update and of a scoring pass, and the positions all ranks laid out."""
    mesh, ledger = mesh_of(sizes), Ledger()
    engine = TrainEngine(softened(Case()), settings({}), ledger, 9, mesh)
    metrics = MetricAccumulator()
    with ledger.step(1):
        engine.update(samples(), metrics)
        engine.score(samples(), "old_logprob")
    assert ledger.last_section is not None
    return {
        "tokens": ledger.last_section.stage_tokens["update_actor"],
        "flops": ledger.last_section.stage_flops["update_actor"],
        "scored_flops": ledger.last_section.stage_flops["old_logprob"],
        "laid_out": reduced(mesh, metrics)["tokens/laid_out"],
    }


class Small(torch.nn.Module):
    """Rows that do not divide, fewer rows than ranks, and one number alone."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"a": (7, 3), "b": (3, 2), "c": (1,), "d": (9, 4)}.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape, generator=generator)))


def parts_and_wholes(sizes: MeshSizes) -> dict[str, tuple[bool, bool, int, tuple[int, ...]]]:
    """By parameter: whether the whole comes back, whether its part is found again, copies, and the part's shape."""
    mesh, module, plain = mesh_of(sizes), Small(), Small()
    assert mesh.parameter_mesh is not None
    if sizes.tensor_parallel > 1:
        for name, cut in {"a": Shard(0), "d": Shard(1)}.items():
            divided = distribute_tensor(
                module.get_parameter(name).detach(), mesh.parameter_mesh["tp"], [cut], src_data_rank=None
            )
            module.register_parameter(name, torch.nn.Parameter(divided))
    fully_shard(module, mesh=mesh.parameter_mesh["replicate", "fsdp"])
    found = {}
    for name, parameter in module.named_parameters():
        whole = plain.get_parameter(name).detach()
        part = part_of(whole, parameter)
        found[name] = (
            torch.equal(full_tensor(parameter), whole),
            torch.equal(part, local_part(parameter)),
            num_copies(parameter, mesh.world_size),
            tuple(part.shape),
        )
    return found


def scored_by_reference(actor: MeshSizes, reference: MeshSizes) -> tuple[list[Any], list[Any]]:
    """Scores of a reference on a mesh of its own, before and after an update of the actor on another."""
    engine = TrainEngine(softened(Case()), settings({}), Ledger(), 9, mesh_of(actor))
    config = settings({})
    other = ModelEngine(softened(Case()), config.train, config.batch, Ledger(), None, mesh=mesh_of(reference))
    before = engine.score(samples(), "ref_logprob", other)
    engine.update(samples(), MetricAccumulator())
    return before, engine.score(samples(), "ref_logprob", other)


class PlainSum:
    """Replicas that agree by an all-reduce of their own, once per update: what HSDP does, through the hook."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._is_last = group, True
        self._held: list[Tensor | None] = []

    def hook(self) -> Callable[[Tensor], None]:
        number = len(self._held)
        self._held.append(None)

        def reduce(gradient: Tensor) -> None:
            held = self._held[number]
            if held is not None:
                gradient += held
            self._held[number] = None if self._is_last else gradient.clone()
            if self._is_last:
                dist.all_reduce(gradient, group=self._group)
            else:
                gradient.zero_()

        return reduce

    def expect(self, is_last: bool) -> None:
        self._is_last = is_last


def synced(sizes: MeshSizes, by_hook: bool) -> dict[str, Tensor]:
    """Masters after an update of several micro-batches, replicas agreeing in a hook or as HSDP does."""
    mesh, config = mesh_of(sizes), settings({"batch": {"token_budget": 40, "share_prefixes": False}})
    sync = None
    if by_hook:
        assert mesh.parameter_mesh is not None
        sync = PlainSum(mesh.parameter_mesh.get_group("replicate"))
    engine = ModelEngine(
        softened(Case()), config.train, config.batch, Ledger(), 1, mesh=mesh, replica_sync=sync
    )
    head = HeadSettings(1.0, None, 64)
    engine.update(
        samples(),
        "update_actor",
        lambda model, inputs: score(model, inputs, head),
        lambda values, members: LossOutput(values[0].sum() / 10),
        MetricAccumulator(),
    )
    return {name: full_tensor(master).clone() for name, master in engine.optimizer.masters().items()}
