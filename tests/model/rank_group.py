"""Runs a function on several gloo ranks: processes forked from one that has imported everything, so they start fast."""

import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 240.0  # a slow machine is no failure; a hang still ends


def run_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)` on every rank, inside an open process group; what each returned, in order of ranks.

    The function is one of a module's own (it is found by name), and its results can be pickled. What a rank raises
    is raised here with its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        return _run(num_ranks, _joined, (str(Path(folder) / "store"), num_ranks, function, arguments))


def run_placed(
    num_ranks: int, function: Callable[..., Any], *arguments: Any, launcher: str = "torchrun"
) -> list[Any]:
    """The same as a launcher does it: ranks that know their place from the environment, and join by themselves.

    Under "torchrun" the store they meet at is the launcher's, under "slurm" the first rank opens it.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port if launcher == "torchrun" else _free_port()
    return _run(num_ranks, _placed, (launcher, port, num_ranks, function, arguments))


def _run(num_ranks: int, start: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    _ensure_server(context)
    ranks = []
    for rank in range(num_ranks):
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_run_rank, args=(rank, sending, start, arguments), daemon=True)
        process.start()
        sending.close()
        ranks.append((process, receiving))
    outcomes = _receive(dict(enumerate(receiving for _, receiving in ranks)))
    for process, _ in ranks:
        process.join(2)
        if process.is_alive():
            process.kill()
    failures = [text for failed, text in outcomes.values() if failed]
    assert not failures, "\n".join(failures)
    return [outcomes[rank][1] for rank in range(num_ranks)]


def _ensure_server(context: ForkServerContext) -> None:
    """The process that ranks are forked from, which imports what this one would import."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    context.set_forkserver_preload(["rank_group", "paceline.schedules"])
    ensure_running()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def _receive(pending: dict[int, Connection]) -> dict[int, tuple[bool, Any]]:
    """(failed, value or traceback) by rank; after the first failure the others get a moment to say theirs."""
    outcomes: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + LIMIT_S
    while pending:
        ready = wait(list(pending.values()), deadline - time.monotonic())
        if not ready:
            outcomes |= {rank: (True, f"rank {rank} said nothing in time") for rank in pending}
            break
        for rank in [rank for rank, receiving in pending.items() if receiving in ready]:
            try:
                outcomes[rank] = pending.pop(rank).recv()
            except EOFError:
                outcomes[rank] = True, f"rank {rank} ended without a word"
            if outcomes[rank][0]:
                deadline = min(deadline, time.monotonic() + 5.0)
    return outcomes


def _run_rank(rank: int, sending: Connection, start: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        sending.send((False, start(rank, *arguments)))
    except BaseException:  # reported to the test, which fails with it
        sending.send((True, f"rank {rank}:\n{traceback.format_exc()}"))
    finally:
        sending.close()


def _joined(rank: int, store: str, num_ranks: int, function: Callable[..., Any], arguments: Any) -> Any:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=180)
    )
    try:
        return function(*arguments)
    finally:
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _placed(
    rank: int, launcher: str, port: int, num_ranks: int, function: Callable[..., Any], arguments: Any
) -> Any:
    torchrun = {
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    slurm = {
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(num_ranks),
        "SLURM_LOCALID": str(rank),
        "SLURM_JOB_NODELIST": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    os.environ |= torchrun if launcher == "torchrun" else slurm
    return function(*arguments)
