"""Processes that stay up over many tests and run one function at a time as the ranks of a gloo process group."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_LIMIT_S = 240


class RankPool:
    """`run(world_size, function, ...)` calls `function(...)` on that many ranks and returns their results in order.

    Each world size has processes of its own with one process group for good: PyTorch's caches of DTensor operations
    outlive a process group and then name groups that are gone.
    """

    def __init__(self) -> None:
        os.environ["OMP_NUM_THREADS"] = "1"
        self._context = multiprocessing.get_context("forkserver")
        # imported once and inherited, instead of once per process
        self._context.set_forkserver_preload(["paceline.engine.trainer", "transformers.models.llama"])
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        self._pipes: dict[int, list[Connection]] = {}
        self._processes: list[BaseProcess] = []

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Raises `RuntimeError` with a rank's traceback when it failed, or when it did not answer in time."""
        answers = self.outcomes(world_size, function, *args)
        for rank, (failure, _) in enumerate(answers):
            if failure is not None:
                raise RuntimeError(f"rank {rank} failed:\n{failure}")
        return [result for _, result in answers]

    def outcomes(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """(traceback or None, result) of every rank."""
        if world_size not in self._pipes:
            self._start(world_size)
        for pipe in self._pipes[world_size]:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes[world_size]):
            if not pipe.poll(_LIMIT_S):
                raise RuntimeError(f"rank {rank} did not answer within {_LIMIT_S} s")
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append(("the process ended", None))
        return answers

    def close(self) -> None:
        for pipe in (pipe for pipes in self._pipes.values() for pipe in pipes):
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.terminate()
        self._folder.cleanup()

    def _start(self, world_size: int) -> None:
        store = Path(self._folder.name) / f"store{world_size}"
        self._pipes[world_size] = []
        for rank in range(world_size):
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(rank, world_size, str(store), there), daemon=True
            )
            process.start()
            there.close()
            self._pipes[world_size].append(here)
            self._processes.append(process)


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=180),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            answer = (None, function(*args))
        except Exception:  # whatever it was, the test that asked has to see it
            answer = (traceback.format_exc(), None)
        pipe.send(answer)
    dist.destroy_process_group()
