"""One engine process as the run sees it: its socket, its answers, and how it ends.

Who waits for what: a reader thread blocks on the child's socket and hands everything to an inbox; the run's thread
takes from the inbox, with a limit; it sends orders itself. Closing the socket is how a child learns to leave.
"""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.rollout.errors import ReplicaDiedError, ReplicaRefusedError
from paceline.rollout.foreign.frames import FrameReader, Message, send_frame

PACKAGE = Path(__file__).parents[2]

# In another Python only the files named here are imported: the packages above them get no `__init__`, which would
# import what that environment need not have.
_FOREIGN_BOOTSTRAP = """
import importlib, json, signal, sys, types
signal.signal(signal.SIGINT, signal.SIG_IGN)
root = sys.argv[3]
for name in ("paceline", "paceline.rollout", "paceline.sync"):
    module = types.ModuleType(name)
    module.__path__ = [root + name[len("paceline"):].replace(".", "/")]
    sys.modules[name] = module
importlib.import_module(sys.argv[1]).main(int(sys.argv[2]), json.loads(sys.argv[4]))
"""

_OWN_BOOTSTRAP = """
import importlib, json, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = json.loads(sys.argv[3])
importlib.import_module(sys.argv[1]).main(int(sys.argv[2]), json.loads(sys.argv[4]))
"""

_CLOSE_GRACE_S = 10.0
_EXIT_GRACE_S = 1.0
_LAST_LINES = 8


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """How to start an engine's process: a module whose `main(fd, setup)` serves, and what it is told.

    `python` None is the run's own Python with the run's own import path; any other gets the files of `foreign/` only.
    """

    module: str
    setup: Mapping[str, Any]
    python: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def arguments(self, fd: int) -> list[str]:
        """The command line, with the number of the child's socket."""
        own = self.python is None
        bootstrap = _OWN_BOOTSTRAP if own else _FOREIGN_BOOTSTRAP
        place = json.dumps(sys.path) if own else str(PACKAGE)
        python = self.python or sys.executable
        return [python, "-u", "-c", bootstrap, self.module, str(fd), place, json.dumps(dict(self.setup))]


class EngineChild:
    """A started engine process. `notify` is called, from a thread, whenever something has arrived."""

    def __init__(
        self,
        name: str,
        command: ChildCommand,
        log_path: Path | None = None,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self._notify, self._log_path = name, notify, log_path
        self._socket, child_socket = socket.socketpair()
        output = (
            subprocess.DEVNULL
            if log_path is None
            else os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        )
        with child_socket:
            self.process = subprocess.Popen(
                command.arguments(child_socket.fileno()),
                pass_fds=(child_socket.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # a group of its own: Ctrl-C reaches the run only, and what the engine starts can be ended with it
                start_new_session=True,
                env={**os.environ, **command.environment},
            )
        if output != subprocess.DEVNULL:
            os.close(output)
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._rows: deque[tuple[int, list[Any]]] = deque()
        self._answers: dict[int, Message] = {}
        self._num_calls = 0
        self._ended: str | None = None
        self._last_sign = time.monotonic()
        self.facts: Message | None = None
        threading.Thread(target=self._read, name=f"reader of {name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """Process id, which is also the id of its process group."""
        return self.process.pid

    @property
    def is_ready(self) -> bool:
        """Whether it has said that it serves."""
        return self.facts is not None

    def poll_ready(self) -> bool:
        """Whether it serves or has ended, by what has arrived."""
        self._drain(0.0)
        return self.is_ready or self._ended is not None

    @property
    def silent_s(self) -> float:
        """Seconds since its last sign of life, or since something was last asked of it."""
        return time.monotonic() - self._last_sign

    def _read(self) -> None:
        reader = FrameReader(self._socket)
        try:
            while True:
                for message in reader.read(wait=True):
                    self._inbox.put(message)
                self._notify()
        except (EOFError, OSError):  # closed by the child, or by `close` in our own thread
            self._inbox.put(None)
            self._notify()

    def send(self, order: Message) -> None:
        """Sends an order. Raises `ReplicaDiedError` when the child is gone."""
        try:
            send_frame(self._socket, order)
        except OSError as error:
            raise ReplicaDiedError(self.name, self.end_of_life()) from error
        self._last_sign = max(self._last_sign, time.monotonic())

    def take(self, timeout_s: float = 0.0) -> list[tuple[int, list[Any]]]:
        """Token rows that have arrived with their weight versions, waiting at most `timeout_s` for the first.

        Raises:
            ReplicaDiedError: the child is gone and everything it sent has been taken.
        """
        self._drain(0.0)
        if not self._rows and timeout_s > 0:
            self._drain(timeout_s)
        rows = list(self._rows)
        self._rows.clear()
        if not rows and self._ended is not None:
            raise ReplicaDiedError(self.name, self._ended)
        return rows

    def wait_ready(self, timeout_s: float) -> Message:
        """What the child said of itself once it served.

        Raises:
            ReplicaDiedError: it ended before that, or took longer than `timeout_s` (and was killed).
        """
        until = time.monotonic() + timeout_s
        while self.facts is None:
            self._wait_until(until, f"not ready after {timeout_s:.0f} s", "setup")
        return self.facts

    def begin_call(self, name: str, **arguments: Any) -> int:
        """Asks for something that has an answer and returns its number; `end_call` waits for it."""
        self._num_calls += 1
        self.send({"order": "call", "call": self._num_calls, "name": name, "arguments": arguments})
        return self._num_calls

    def end_call(self, number: int, what: str, timeout_s: float, stage: str = "rollout") -> Any:
        """The answer to a call.

        Raises:
            ReplicaRefusedError: the child could not do it and says why.
            ReplicaDiedError: the child ended, or did not answer in time (and was killed).
        """
        until = time.monotonic() + timeout_s
        while number not in self._answers:
            self._wait_until(until, f"no answer to {what} after {timeout_s:.0f} s", stage)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise ReplicaRefusedError(self.name, f"{what}: {answer['error']}", stage)
        return answer["answer"]

    def call(self, name: str, timeout_s: float, stage: str = "rollout", **arguments: Any) -> Any:
        """`begin_call` and `end_call`."""
        return self.end_call(self.begin_call(name, **arguments), name, timeout_s, stage)

    def _wait_until(self, until: float, too_late: str, stage: str) -> None:
        if self._ended is not None:
            raise ReplicaDiedError(self.name, self._ended, stage)
        remaining = until - time.monotonic()
        if remaining <= 0:
            self.kill()
            raise ReplicaDiedError(self.name, too_late, stage)
        self._drain(min(remaining, 1.0))

    def _drain(self, timeout_s: float) -> None:
        try:
            message = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
            while True:
                self._sort(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            return

    def _sort(self, message: Message | None) -> None:
        self._last_sign = time.monotonic()
        if message is None:
            self._ended = self._ended or self.end_of_life()
        elif "tokens" in message:
            self._rows.extend((message["version"], row) for row in message["tokens"])
        elif "ready" in message:
            self.facts = message["ready"]
        else:
            self._answers[message["call"]] = message

    def end_of_life(self) -> str:
        """How the child ended, with the last lines it printed."""
        try:
            code = self.process.wait(timeout=_EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return "closed its connection without ending, and was killed" + last_lines(self._log_path)
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return how + ("" if code < 0 else last_lines(self._log_path))

    def kill(self) -> None:
        """Ends the process and everything it started, now."""
        with contextlib.suppress(ProcessLookupError):  # the group may be empty already
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """Lets the process leave by itself, and kills what is left after a while."""
        with contextlib.suppress(OSError):  # not connected any more
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=_CLOSE_GRACE_S)
        self.kill()
        self._socket.close()


def last_lines(log_path: Path | None) -> str:
    """The end of what a process printed, to be put behind what it died of."""
    if log_path is None or not log_path.exists():
        return ""
    lines = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"; its last lines ({log_path}): " + " | ".join(lines[-_LAST_LINES:]) if lines else ""
