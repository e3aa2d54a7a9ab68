"""One worker process as the pool sees it: its socket, its jobs, and how to end it with everything it started."""

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from paceline.rewards.channel import MessageReader, encode
from paceline.rewards.worker import WorkerSetup
from paceline.types import Verdict

# The import path is handed over, and the caller's own script is not run again as multiprocessing's spawn would: the
# script may have no main guard, and importing what it imports would cost each worker seconds.
_BOOTSTRAP = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from paceline.rewards.worker import main; main(int(sys.argv[1]))"
)
_TIMEVAL = "ll"

EXIT_GRACE_S = 1.0
"""A process closes its sockets a moment before its exit status can be read; how long to wait for that."""


@dataclass(slots=True)
class PendingJob:
    """A pickled `RewardJob` and where its verdict goes."""

    pickled: bytes
    future: "Future[Verdict]"


class WorkerProcess:
    """A started worker. `assigned` are its jobs without a verdict, the running one first.

    `since` is when the running job started as far as the pool knows: when the batch was sent or the verdict before
    it arrived; before the worker is ready, when it was started.
    """

    def __init__(self, setup: WorkerSetup, output_fd: int) -> None:
        self.socket, child_socket = socket.socketpair()
        with child_socket:
            # Unbuffered (-u), because a worker that is killed could not flush what a reward has printed.
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", _BOOTSTRAP, str(child_socket.fileno()), json.dumps(sys.path)],
                pass_fds=(child_socket.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output_fd,
                stderr=output_fd,
                # A group of its own: Ctrl-C reaches the main process only, and a grader's children can be ended too.
                start_new_session=True,
                # Workers run side by side: numerical libraries inside them should not each take every core.
                env={"OMP_NUM_THREADS": "1", **os.environ},
            )
        self._reader = MessageReader(self.socket)
        self._limit_send_time(setup.timeout_s)
        self.is_ready = False
        self.since = time.monotonic()
        self.assigned: deque[PendingJob] = deque()
        self.socket.sendall(encode(setup))

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self.process.pid

    def send(self, jobs: Sequence[PendingJob]) -> bool:
        """Hands jobs to an idle worker; False when it turns out to be gone or stuck, and then nothing is assigned."""
        try:
            self.socket.sendall(encode([job.pickled for job in jobs]))
        except (BrokenPipeError, ConnectionResetError, BlockingIOError):
            return False
        self.assigned.extend(jobs)
        self.since = time.monotonic()
        return True

    def receive(self) -> tuple[list[Any], bool]:
        """Messages that have arrived, and whether the worker has closed its side."""
        return self._reader.read_available()

    def end(self, has_closed: bool = False) -> str:
        """Kills the worker and its children, and says how it ended (or had ended already).

        `has_closed` says that its side of the socket is closed, so that it is probably ending by itself right now.
        """
        exit_code = self._exit_code_if_it_ended_itself(EXIT_GRACE_S if has_closed else 0.0)
        with contextlib.suppress(ProcessLookupError):  # the group may be empty already
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()
        self.socket.close()
        if exit_code is None:
            return "was killed"
        if exit_code < 0:
            return f"died of {signal.Signals(-exit_code).name}"
        return f"exited with code {exit_code}"

    def _exit_code_if_it_ended_itself(self, grace_s: float) -> int | None:
        # Not reaped here, so that the process id cannot be taken by another process before the group is killed.
        give_up = time.monotonic() + grace_s
        while (ended := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None:
            if time.monotonic() >= give_up:
                return None
            time.sleep(0.001)
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def _limit_send_time(self, seconds: float) -> None:
        timeval = struct.pack(_TIMEVAL, int(seconds) + 1, 0)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
