"""A bounded wait with a named culprit, measured as waiting."""

import time

import torch.distributed as dist
from rank_group import run_ranks

from paceline.config.parallelism import MeshSizes
from paceline.engine.meeting import meet
from paceline.engine.mesh import RankMesh
from paceline.telemetry.ledger import Ledger


def test_one_process_meets_nobody():
    ledger = Ledger()
    with ledger.step(1):
        meet(RankMesh.single(), ledger, "nobody")
    assert ledger.last_section is not None and not ledger.last_section.stage_ns


def late_and_absent() -> tuple[dict[str, float], str]:
    """Seconds by stage of a step in which rank 1 is late; then what is said of rank 2, which does not come."""
    mesh, ledger = RankMesh.from_process_group(MeshSizes(shard=3), "cpu"), Ledger()
    meet(mesh, ledger, "the others' start")
    with ledger.step(1):
        if mesh.rank == 1:
            with ledger.span("rollout"):
                time.sleep(0.5)  # the lateness that the others must show as waiting
        meet(mesh, ledger, "the others' samples")
    assert ledger.last_section is not None
    said = ""
    if mesh.rank != 2:
        try:
            meet(mesh, ledger, "the others' samples", timeout_s=1.0)
        except RuntimeError as error:
            said = str(error)
    dist.barrier()
    return ledger.last_section.stage_s, said


def test_who_waits_shows_it_as_idle_and_a_rank_that_does_not_come_is_named():
    (first, said), (late, _), (third, _) = run_ranks(3, late_and_absent)
    assert first["idle"] > 0.2 and third["idle"] > 0.2
    assert late["idle"] < late["rollout"]
    assert "Ranks 2 failed" in said or "rank 2" in said.lower(), said
