"""Main of a process that runs vLLM for a run, in the Python that has it."""

import socket

from paceline.rollout.foreign.frames import Message
from paceline.rollout.foreign.loop import serve
from paceline.rollout.foreign.vllm_core import VllmCore


def main(fd: int, setup: Message) -> None:
    """Serves until the run closes its side of socket `fd`. `setup`: `arguments` (vLLM's), `sleep_level`."""
    core = VllmCore(setup["arguments"], setup["sleep_level"])
    with socket.socket(fileno=fd) as connection:
        serve(connection, core, core.facts)
