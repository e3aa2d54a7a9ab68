"""A server as an engine's process is seen (`remote/child.py`): orders out, token rows in, and how it ends.

Who waits for what: every running sample has a thread that reads its stream and puts rows into an inbox; a call with an
answer has a thread too; the run's thread takes from the inbox, with a limit.
"""

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from paceline.rollout.errors import ReplicaDiedError, ReplicaError, ReplicaRefusedError
from paceline.rollout.foreign.frames import Message
from paceline.rollout.foreign.loop import TokenRow
from paceline.rollout.remote.child import last_lines
from paceline.rollout.server.http import HttpEndpoint, ServerSaidNoError

_POLL_S = 0.5
_CLOSE_GRACE_S = 10.0
_FULL = frozenset({429, 503})
_FULL_PAUSE_S = 1.0


class ServerApi(Protocol):
    """What differs between servers. All methods may block; `OSError` means that nobody answers."""

    endpoint: HttpEndpoint

    def facts(self) -> Message:
        """What the server says of itself; raises while it does not serve yet."""
        ...

    def generate(
        self, order: Message, index: int, opened: Callable[[Callable[[], None]], None]
    ) -> Iterator[tuple[list[int], list[float], str | None]]:
        """Rows of one sample of a submit order: (new tokens, their log-probs, finish reason or None)."""
        ...

    def call(self, name: str, arguments: Message) -> Any:
        """An order with an answer: load, sleep, wake, stats, score."""
        ...


class ServerLink:
    """An `EngineLink` over a server; `process` is the server where the run started it."""

    def __init__(
        self,
        name: str,
        api: ServerApi,
        notify: Callable[[], None] = lambda: None,
        process: "subprocess.Popen[bytes] | None" = None,
        log_path: Path | None = None,
    ) -> None:
        self.name = name
        self.facts: Message | None = None
        self._api, self._notify, self._process, self._log_path = api, notify, process, log_path
        self._inbox: queue.SimpleQueue[tuple[int, TokenRow] | ReplicaError] = queue.SimpleQueue()
        self._answers: dict[int, queue.SimpleQueue[Any]] = {}
        self._streams: dict[tuple[int, int], Callable[[], None]] = {}
        self._aborted: set[int] = set()
        self._lock = threading.Lock()
        self._version = self._num_calls = 0
        self._last_sign = time.monotonic()
        self._ended: str | None = None

    @property
    def pid(self) -> int:
        """Process id of a server the run started; 0 for one that ran before."""
        return 0 if self._process is None else self._process.pid

    @property
    def is_ready(self) -> bool:
        """Whether it has said that it serves."""
        return self.facts is not None

    @property
    def silent_s(self) -> float:
        """Seconds since its last sign of life, or since something was last asked of it."""
        return time.monotonic() - self._last_sign

    def poll_ready(self) -> bool:
        """Whether it serves or has ended, asked now."""
        if self.facts is None and self._ended is None:
            if self._process is not None and self._process.poll() is not None:
                self._ended = f"exited with code {self._process.returncode}{last_lines(self._log_path)}"
            else:
                with contextlib.suppress(OSError, ServerSaidNoError):  # not yet
                    self.facts = self._api.facts()
        return self.is_ready or self._ended is not None

    def wait_ready(self, timeout_s: float) -> Message:
        """See `EngineChild.wait_ready`."""
        until = time.monotonic() + timeout_s
        while not self.poll_ready():
            if time.monotonic() > until:
                self.kill()
                cause = f"{self._api.endpoint.address} does not serve after {timeout_s:.0f} s"
                raise ReplicaDiedError(self.name, cause, "setup")
            time.sleep(_POLL_S)
        if self.facts is None:
            raise ReplicaDiedError(self.name, str(self._ended), "setup")
        return self.facts

    def send(self, order: Message) -> None:
        """Starts the streams of a request, or ends them."""
        self._last_sign = time.monotonic()
        if order["order"] == "abort":
            self._end_streams(order["id"])
            return
        for index, sample in enumerate(order["samples"]):
            if sample["ended"] is not None:
                self._put((self._version, [order["id"], index, [], [], sample["ended"]]))
                continue
            arguments = (order, index, self._version)
            threading.Thread(target=self._stream, args=arguments, daemon=True).start()

    def _stream(self, order: Message, index: int, version: int) -> None:
        request_id = order["id"]

        def opened(end: Callable[[], None]) -> None:
            with self._lock:
                self._streams[request_id, index] = end
                if request_id in self._aborted:
                    raise ConnectionAbortedError

        try:
            while not self._streamed(order, index, version, opened):
                time.sleep(_FULL_PAUSE_S)
        except (
            OSError,
            ValueError,
            AttributeError,
        ) as error:  # ended in our own hands, it fails in many ways
            if request_id in self._aborted:
                self._put((version, [request_id, index, [], [], "abort"]))
            else:
                self._put(ReplicaDiedError(self.name, f"{type(error).__name__}: {error}"))
        except ServerSaidNoError as error:
            self._put(ReplicaError(self.name, str(error)))
        finally:
            with self._lock:
                self._streams.pop((request_id, index), None)

    def _streamed(
        self, order: Message, index: int, version: int, opened: Callable[[Callable[[], None]], None]
    ) -> bool:
        """Reads a sample's stream to its end; False where the server is full. It waits for it in this thread, and only
        this sample does; `silent_s` bounds it, after which the router does the sample elsewhere."""
        finish = None
        try:
            for tokens, logprobs, finish in self._api.generate(order, index, opened):
                self._put((version, [order["id"], index, tokens, logprobs, finish]))
        except ServerSaidNoError as error:
            if error.status in _FULL and order["id"] not in self._aborted:
                return False
            raise
        if finish is None:
            raise ConnectionError("the stream ended before the sample did")
        return True

    def _put(self, news: tuple[int, TokenRow] | ReplicaError) -> None:
        self._inbox.put(news)
        self._notify()

    def _end_streams(self, request_id: int) -> None:
        with self._lock:
            self._aborted.add(request_id)
            ends = [end for (owner, _), end in self._streams.items() if owner == request_id]
        for end in ends:
            with contextlib.suppress(OSError, ServerSaidNoError):  # its stream is at an end by itself
                end()

    def take(self, timeout_s: float = 0.0) -> list[tuple[int, TokenRow]]:
        """See `EngineChild.take`. Raises what a stream ended of."""
        rows: list[tuple[int, TokenRow]] = []
        try:
            news = self._inbox.get(timeout=timeout_s) if timeout_s > 0 else self._inbox.get_nowait()
            while True:
                if isinstance(news, ReplicaError):
                    raise news
                rows.append(news)
                self._last_sign = time.monotonic()
                news = self._inbox.get_nowait()
        except queue.Empty:
            return rows

    def begin_call(self, name: str, **arguments: Any) -> int:
        """See `EngineChild.begin_call`."""
        self._num_calls += 1
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers[self._num_calls] = answers

        def ask() -> None:
            try:
                answers.put((True, self._api.call(name, arguments)))
            except Exception as error:  # handed to the thread that waits for the answer
                answers.put((False, error))

        threading.Thread(target=ask, daemon=True).start()
        return self._num_calls

    def end_call(self, number: int, what: str, timeout_s: float, stage: str = "rollout") -> Any:
        """See `EngineChild.end_call`."""
        try:
            is_done, answer = self._answers.pop(number).get(timeout=timeout_s)
        except queue.Empty:
            self.kill()
            cause = f"no answer to {what} after {timeout_s:.0f} s"
            raise ReplicaDiedError(self.name, cause, stage) from None
        self._last_sign = time.monotonic()
        if is_done:
            if what == "load weights":
                self._version = answer["version"]
            return answer
        if isinstance(answer, OSError):
            raise ReplicaDiedError(self.name, f"{what}: {answer}", stage)
        raise ReplicaRefusedError(self.name, f"{what}: {answer}", stage)

    def call(self, name: str, timeout_s: float, stage: str = "rollout", **arguments: Any) -> Any:
        """`begin_call` and `end_call`."""
        return self.end_call(self.begin_call(name, **arguments), name, timeout_s, stage)

    def kill(self) -> None:
        """Ends all streams, and the server where the run started it."""
        with self._lock:
            self._aborted |= {owner for owner, _ in self._streams}
            ends = list(self._streams.values())
        for end in ends:
            with contextlib.suppress(OSError, ServerSaidNoError):  # a server that is gone aborts nothing
                end()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):  # the group may be empty already
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Lets a server that the run started leave; others go on serving."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_CLOSE_GRACE_S)
        self.kill()
