"""Where ranks wait for one another: measured as waiting, bounded, and with the missing ones named."""

from datetime import timedelta

import torch.distributed as dist

from paceline.engine.mesh import RankMesh
from paceline.telemetry.ledger import Ledger


def meet(mesh: RankMesh, ledger: Ledger, what: str, timeout_s: float | None = None) -> None:
    """Returns when every rank is here. The wait is stage `idle` with cause `queue`, apart from what follows it, so
    that an exchange after it costs what it costs and not what a slower rank costs.

    Raises:
        RuntimeError: some ranks did not come within `timeout_s` (None: the process group's limit); the first rank's
            message names them.
    """
    if mesh.object_group is None:
        return
    timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
    with ledger.span("idle", f"for {what}", cause="queue"):
        dist.monitored_barrier(mesh.object_group, timeout, wait_all_ranks=True)


def any_rank(mesh: RankMesh, ledger: Ledger, flag: bool, what: str) -> bool:
    """Whether `flag` is set on some rank. All ranks must ask together, and all get the same answer."""
    if mesh.object_group is None:
        return flag
    with ledger.span("idle", f"for {what}", cause="queue"):
        return bool(mesh.max_count(int(flag)))
