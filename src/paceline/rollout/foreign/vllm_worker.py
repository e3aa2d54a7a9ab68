"""Main of a process that runs vLLM for a run, in the Python that has it."""

import os
import socket

from paceline.rollout.foreign.frames import Message
from paceline.rollout.foreign.loop import serve


def main(fd: int, setup: Message) -> None:
    """Serves until the run closes its side of socket `fd`. `setup`: `arguments` (vLLM's), `sleep_level`."""
    # in one process: one thing to kill, and one place where weights go
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from paceline.rollout.foreign.vllm_core import VllmCore

    core = VllmCore(setup["arguments"], setup["sleep_level"])
    with socket.socket(fileno=fd) as connection:
        serve(connection, core, core.facts)
