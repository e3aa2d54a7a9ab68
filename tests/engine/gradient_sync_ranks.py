"""What the replicas of test_engine_gradient_sync run, each as one rank of a gloo process group."""

import math
from typing import Any

import torch
import torch.distributed as dist
from parallel_cases import Case, mesh_of, reduced, samples, settings, softened
from torch import Tensor

from paceline.config.parallelism import MeshSizes
from paceline.engine.gradient_sync.compression import Compressor
from paceline.engine.gradient_sync.exchange import exchange
from paceline.engine.gradient_sync.replicas import CompressedSync, LocalSteps
from paceline.engine.shards import full_tensor, local_part
from paceline.engine.trainer import TrainEngine
from paceline.telemetry.ledger import Ledger
from paceline.telemetry.metrics import MetricAccumulator


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def gradient(rank: int, update: int, size: int = 1000) -> Tensor:
    generator = torch.Generator().manual_seed(100 * update + rank)
    return torch.randn(size, generator=generator) * 10 ** torch.randint(-4, 2, (size,), generator=generator)


def all_gradients(update: int, size: int = 1000) -> list[Tensor]:
    return [gradient(rank, update, size) for rank in range(dist.get_world_size())]


def exchanged_and_all_reduced(compressor: Compressor) -> tuple[Tensor, Tensor, Tensor, int]:
    """(sum by `exchange`, sum by all_reduce, held back, bytes sent)."""
    own = gradient(dist.get_rank(), 0)
    expected = own.clone()
    dist.all_reduce(expected)
    found = exchange(own, compressor, world())
    return found.sum_N, expected, found.held_back_N, found.num_bytes


def totals_of_error_feedback(compressor: Compressor, num_updates: int) -> tuple[Tensor, Tensor, list[float]]:
    """(everything that arrived plus everything still held back anywhere, everything there was, held-back shares)."""
    sync = CompressedSync(compressor, world())
    hook = sync.hook()
    arrived = torch.zeros(1000, dtype=torch.float64)
    there_was = torch.zeros(1000, dtype=torch.float64)
    shares = []
    for update in range(num_updates):
        own = gradient(dist.get_rank(), update)
        there_was += sum(all_gradients(update)).double()
        hook(own)
        arrived += own.double()
        shares.append(sync.end_update(True, list).held_back_share)
    held_back = sync.residuals[0].double()
    dist.all_reduce(held_back)
    return arrived + held_back, there_was, shares


def micro_batches_and_one(compressor: Compressor) -> tuple[Tensor, Tensor]:
    """The gradient FSDP ends up with from three micro-batches, and from one that is their sum."""
    pieces = [gradient(dist.get_rank(), update) for update in range(3)]
    sync = CompressedSync(compressor, world())
    hook = sync.hook()
    accumulated = torch.zeros(1000)
    for number, piece in enumerate(pieces):
        sync.expect(number == len(pieces) - 1)
        arriving = piece.clone()
        hook(arriving)
        accumulated += arriving
    sync.end_update(True, list)
    whole = pieces[0].clone()
    for piece in pieces[1:]:
        whole = piece + whole
    once = CompressedSync(compressor, world())
    once.hook()(whole)
    return accumulated, whole


def residual_across_a_skipped_update(compressor: Compressor) -> tuple[bool, bool, bool, int]:
    """(the sum is not finite on this rank, the residual is as before, and is finite, bytes of the skipped update)."""
    sync = CompressedSync(compressor, world())
    hook = sync.hook()
    hook(gradient(dist.get_rank(), 0))
    sync.end_update(True, list)
    before = sync.residuals[0].clone()
    bad = gradient(dist.get_rank(), 1)
    if dist.get_rank() == 1:
        bad[17] = math.nan
    hook(bad)
    not_finite = not bool(torch.isfinite(bad).all())
    report = sync.end_update(False, list)
    after = sync.residuals[0]
    return not_finite, torch.equal(before, after), bool(torch.isfinite(after).all()), report.num_bytes


def local_steps(every: int, num_updates: int) -> list[tuple[float, int]]:
    """(a weight that moves by the rank's own gradient, bytes sent) after every update."""
    sync = LocalSteps(every, world())
    hook = sync.hook()
    weight = torch.zeros(4)
    state = [weight]
    seen = []
    for _ in range(num_updates):
        own = torch.full((4,), float(dist.get_rank() + 1))
        hook(own)
        weight -= own
        report = sync.end_update(True, lambda: state)
        seen.append((float(weight[0]), report.num_bytes))
    sync.synchronise(lambda: state)
    seen.append((float(weight[0]), sync.synchronise(lambda: state).num_bytes))
    return seen


def trained(train: dict[str, object], sizes: MeshSizes, num_updates: int) -> dict[str, Any]:
    """A tiny model after some updates: metrics, whole parameters and moments, and whether replicas are bit-equal."""
    config = settings(
        {
            "train": train,
            "batch": {"token_budget": 40, "share_prefixes": False, "num_epochs": num_updates},
            "cluster": {"num_devices": sizes.num_ranks, "replicate_size": sizes.replicate},
        }
    )
    mesh = mesh_of(sizes)
    engine = TrainEngine(softened(Case("llama", sizes)), config, Ledger(), num_updates, mesh)
    history = []
    for seed in range(num_updates):
        metrics = MetricAccumulator()
        engine.update(samples(seed), metrics)
        if seed == num_updates - 1:
            engine.engine.replicas.average_now(metrics)
        history.append(reduced(mesh, metrics))
    optimizer = engine.optimizer
    parameters = {name: full_tensor(master).clone() for name, master in optimizer.masters().items()}
    parts = [local_part(t) for t in (*optimizer.masters().values(), *optimizer.moments().values())]
    own = torch.cat([part.flatten() for part in parts])
    everybody = mesh.gather_objects(own.tolist())
    num_others = sizes.num_ranks // sizes.replicate
    twins = [everybody[rank] for rank in range(dist.get_rank() % num_others, sizes.num_ranks, num_others)]
    return {
        "metrics": history,
        "parameters": parameters,
        "replicas_equal": all(twin == twins[0] for twin in twins),
        "held_back_norm": engine.engine.replicas.held_back_norm(),
    }
