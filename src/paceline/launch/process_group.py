"""Joins this rank to the others, and leaves when the run ends."""

import os
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from signal import SIGTERM

import torch
import torch.distributed as dist

from paceline.config import Config, ConfigError
from paceline.launch.devices import backends, check_device_count, num_devices, resolve_kind, take_device
from paceline.launch.placement import LAUNCHER_VARIABLE, Placement, find_placement

_PARENT_POLL_S = 1.0


@contextmanager
def joined_ranks(config: Config) -> Iterator[torch.device]:
    """This rank's device, with the process group of all ranks open around it; one process alone opens none.

    Collectives wait at most `cluster.collective_timeout_s`.

    Raises:
        ConfigError: the launcher started another number of ranks than `cluster.num_devices`, or the node has fewer
            devices.
    """
    kind = resolve_kind(config.cluster.device)
    placement = find_placement(os.environ)
    check_placement(config, placement)
    if placement is None or placement.world_size == 1:
        yield take_device(kind, 0)
        return
    device = take_device(kind, own_device_index(kind, placement))
    if placement.launcher == "paceline":
        _stop_with_parent()
    # torch's own sharding still calls collectives that its latest version renames; a person can do nothing about it
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    dist.init_process_group(
        backend=backends(kind),
        init_method=f"tcp://{placement.master_addr}:{placement.master_port}",
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=timedelta(seconds=config.cluster.collective_timeout_s),
    )
    yield device
    # after an error the others may be inside a collective that would not let this rank go: its end ends them
    dist.destroy_process_group()


def own_device_index(kind: str, placement: Placement) -> int:
    """Which of the devices that torch shows is this rank's: the one of its place on the node.

    Slurm may show every task its own device only (`--gpus-per-task`); then that one is it.

    Raises:
        ConfigError: the node shows fewer devices than ranks.
    """
    if placement.launcher == "slurm" and num_devices(kind) == 1:
        return 0
    check_device_count(kind, placement.local_world_size)
    return placement.local_rank


def check_placement(config: Config, placement: Placement | None) -> None:
    """Refuses a run whose launcher started another number of ranks than its config asks for.

    Raises:
        ConfigError: see above.
    """
    wanted = config.cluster.num_devices
    found = 1 if placement is None else placement.world_size
    if wanted != found:
        launcher = (
            "this process stands alone" if placement is None else f"{placement.launcher} started {found}"
        )
        rule = f"must be the number of ranks, and {launcher}"
        raise ConfigError("cluster.num_devices", wanted, rule, str(found))


def _stop_with_parent() -> None:
    """Asks this rank to save and stop when its launcher has died: nobody else would ever end it.

    It may have died while this rank was still loading its code: then there is no store to meet at, and the rank ends
    here, where nothing handles the signal yet, in place of looking for it until the time limit.
    """
    parent = int(os.environ.get(LAUNCHER_VARIABLE, os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os.kill(os.getpid(), SIGTERM)

    threading.Thread(target=watch, name="launcher watch", daemon=True).start()
