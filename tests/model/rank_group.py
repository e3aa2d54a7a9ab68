"""Runs a function on several gloo ranks: processes forked from one that has imported everything, so they start fast."""

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 45.0


def run_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(*arguments)` on every rank, inside an open process group; what each returned, in order of ranks.

    The function is one of a module's own (it is found by name), and its results can be pickled. What a rank raises
    is raised here with its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_group", "paceline.schedules"])
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = []
        for rank in range(num_ranks):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(
                target=_run_rank, args=(rank, num_ranks, store, sending, function, arguments), daemon=True
            )
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


def _run_rank(
    rank: int, num_ranks: int, store: str, sending: Connection, function: Callable[..., Any], arguments: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=40)
    )
    try:
        sending.send((False, function(*arguments)))
    except BaseException:  # reported to the test, which fails with it
        sending.send((True, f"rank {rank}:\n{traceback.format_exc()}"))
    finally:
        sending.close()
        dist.destroy_process_group()
