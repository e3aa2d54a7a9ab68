"""Scores from a service over HTTP. `docs/rewards.md` has the wire format.

Requests run in threads while the model generates: a batch leaves as soon as it is full, the rest on `flush`. A request
that is not answered in time makes its samples timeouts; a service that is down or answers nonsense makes them errors.
Neither is ever a score.
"""

import contextlib
import http.client
import json
import os
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from urllib.parse import urlsplit

from paceline.config.errors import ConfigError
from paceline.config.reward_schema import RemoteSource
from paceline.rewards.pool import PendingScore, RewardPoolError
from paceline.types import RewardJob, Verdict
from paceline.types.rewards import LARGEST_SCORE

MAX_ANSWER_BYTES = 1 << 24
_SHOWN_ANSWER = 200


class _Failed(Exception):
    """Asking again would change nothing."""


class _Down(Exception):
    """The service could not be reached, or says that it failed: it may do better next time."""


class _TimedOut(Exception):
    """No whole answer within the limit."""


class RemoteScorer:
    """A `RewardSource` that asks `source.url`.

    Raises:
        ConfigError: the environment lacks the variable that `auth_env` names. `key` is what it is called.
    """

    def __init__(self, source: RemoteSource, key: str = "auth_env") -> None:
        self._source = source
        self._secret = _secret(source, key)
        parts = urlsplit(source.url)
        self._place = f"{parts.scheme}://{parts.netloc}{parts.path}"  # a query may hold what a log should not
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname or "", parts.port
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._waiting: list[tuple[RewardJob, PendingScore]] = []
        self._threads = ThreadPoolExecutor(source.concurrency, thread_name_prefix="remote-reward")
        self._closing = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def submit(self, job: RewardJob) -> PendingScore:
        """Queues one job; a full batch leaves at once. Raises `RewardPoolError` when closed."""
        if self._closing.is_set():
            raise RewardPoolError("the remote reward is closed")
        future: PendingScore = Future()
        self._waiting.append((job, future))
        if len(self._waiting) == self._source.batch_size:
            self.flush()
        return future

    def flush(self) -> None:
        """Sends what waits for a full batch."""
        batch, self._waiting = self._waiting, []
        if batch:
            self._threads.submit(self._serve, batch)

    def take_counts(self) -> Mapping[str, int]:
        """Requests sent and sent again since the last call."""
        with self._lock:
            counts = {"requests": self._counts["requests"], "retries": self._counts["retries"]}
            self._counts.clear()
        return counts

    def close(self) -> None:
        """Ends requests under way; samples without a verdict fail with `RewardPoolError`."""
        self._closing.set()
        with self._lock:
            for connected in self._sockets:
                _cut(connected)
        self._threads.shutdown(wait=True)
        for _, future in self._waiting:
            future.set_exception(RewardPoolError("the remote reward is closed"))
        self._waiting = []

    def _serve(self, batch: Sequence[tuple[RewardJob, PendingScore]]) -> None:
        started = time.perf_counter()
        try:
            outcomes = self._ask([job for job, _ in batch])
            seconds = (time.perf_counter() - started) / len(batch)
            for (_, future), (score, message) in zip(batch, outcomes, strict=True):
                outcome = Verdict("score", score, seconds) if score is not None else None
                future.set_result(outcome or Verdict("error", None, seconds, message))
        except _TimedOut as error:
            self._fail(batch, "timeout", started, error)
        except (_Failed, _Down) as error:
            self._fail(batch, "error", started, error)
        # Whatever else went wrong must reach who waits for these scores, or they would wait for ever.
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)

    def _fail(
        self, batch: Sequence[tuple[RewardJob, PendingScore]], outcome: str, started: float, error: Exception
    ) -> None:
        seconds = (time.perf_counter() - started) / len(batch)
        message = f"{self._place}: {error}"
        if self._secret is not None:
            message = message.replace(self._secret, "***")
        for _, future in batch:
            future.set_result(Verdict("timeout" if outcome == "timeout" else "error", None, seconds, message))

    def _ask(self, jobs: Sequence[RewardJob]) -> list[tuple[float | None, str]]:
        body = _encoded(jobs)
        for attempt in range(self._source.retries + 1):
            if attempt:
                # the event, so that a closing run does not wait for a service that is down
                self._closing.wait(self._source.backoff_s * 2 ** (attempt - 1))
            self._count("retries" if attempt else "requests")
            if self._closing.is_set():
                raise _Failed("the run ended")
            try:
                return _decoded(self._post(body), len(jobs))
            except _Down as error:
                last = error
        raise _Down(f"{last} ({self._source.retries + 1} attempts)")

    def _post(self, body: bytes) -> bytes:
        """One request and its answer.

        A watch cuts the connection at the limit: a socket's own timeout begins anew with every byte that arrives.
        """
        limit, is_over = self._source.timeout_s, threading.Event()
        connection = self._connection()
        started = time.monotonic()
        try:
            connection.connect()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._connection_error(error) from error
        connected = connection.sock
        watch = threading.Timer(max(0.0, started + limit - time.monotonic()), _end, (connected, is_over))
        watch.start()
        with self._lock:
            self._sockets.add(connected)
        try:
            connection.request("POST", self._target, body, self._headers())
            answer = connection.getresponse()
            content = answer.read(MAX_ANSWER_BYTES + 1)
        except (OSError, http.client.HTTPException) as error:
            if is_over.is_set():
                raise _TimedOut(f"no answer within {limit:g} s") from error
            raise self._connection_error(error) from error
        finally:
            watch.cancel()
            with self._lock:
                self._sockets.discard(connected)
            connection.close()
        if is_over.is_set():  # an answer of unknown length that was cut off looks whole
            raise _TimedOut(f"no whole answer within {limit:g} s")
        return _checked(answer.status, content)

    def _connection(self) -> http.client.HTTPConnection:
        limit = self._source.timeout_s
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=limit)
        return http.client.HTTPSConnection(self._host, self._port, timeout=limit, context=self._tls)

    def _connection_error(self, error: Exception) -> Exception:
        if isinstance(error, TimeoutError):
            return _TimedOut(f"no answer within {self._source.timeout_s:g} s")
        text = f"{type(error).__name__}: {error}"
        return _Failed(text) if isinstance(error, ssl.SSLCertVerificationError) else _Down(text)

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._secret is not None:
            headers[self._source.auth_header] = self._secret
        return headers

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


def _secret(source: RemoteSource, key: str) -> str | None:
    if source.auth_env is None:
        return None
    value = os.environ.get(source.auth_env)
    if not value:
        rule = "names no variable of the environment, and the service's header takes its value from it"
        raise ConfigError(key, source.auth_env, rule, "null, if the service asks for no header")
    if not value.isprintable():
        rule = "the variable's value holds a line break or another character that no header can"
        raise ConfigError(key, source.auth_env, rule)
    return value


def _encoded(jobs: Sequence[RewardJob]) -> bytes:
    """The request's body. What JSON has no form for (dates of a Parquet column) is sent as its text."""
    samples = [
        {
            "prompt": job.prompt,
            "messages": list(job.messages),
            "completion": job.completion,
            "answer": job.answer,
            "metadata": dict(job.metadata),
        }
        for job in jobs
    ]
    try:
        return json.dumps({"samples": samples}, default=str, allow_nan=False).encode()
    except ValueError as error:
        raise _Failed(f"a sample's metadata cannot be sent: {error}") from error


def _checked(status: int, content: bytes) -> bytes:
    if len(content) > MAX_ANSWER_BYTES:
        raise _Failed(f"the answer is longer than {MAX_ANSWER_BYTES} bytes")
    if status == http.client.OK:
        return content
    shown = " ".join(content[:_SHOWN_ANSWER].decode("utf-8", "replace").split())
    if status >= http.client.INTERNAL_SERVER_ERROR:
        raise _Down(f"status {status}: {shown}")
    redirect = "; redirects are not followed" if 300 <= status < 400 else ""
    raise _Failed(f"status {status}{redirect}: {shown}")


def _decoded(content: bytes, num_samples: int) -> list[tuple[float | None, str]]:
    """Score (or None) and message of every sample."""
    try:
        answer = json.loads(content)
    except ValueError as error:
        raise _Failed(f"the answer is not JSON: {error}") from error
    scores = answer.get("scores") if isinstance(answer, dict) else None
    if not isinstance(scores, list) or len(scores) != num_samples:
        raise _Failed(f"the answer must hold a list `scores` of {num_samples} numbers, one per sample")
    messages = answer.get("messages")
    if not isinstance(messages, list) or len(messages) != num_samples:
        messages = [None] * num_samples
    return [_score(score, message) for score, message in zip(scores, messages, strict=True)]


def _score(score: object, message: object) -> tuple[float | None, str]:
    if score is None:
        return None, str(message or "the service gave no score and no reason")
    if isinstance(score, bool) or not isinstance(score, int | float):
        return None, f"the service gave {score!r}, not a number"
    if not abs(score) <= LARGEST_SCORE:
        return None, "the service gave a score that is not finite, or beyond what float32 holds"
    return float(score), ""


def _cut(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed meanwhile
        connected.shutdown(socket.SHUT_RDWR)


def _end(connected: socket.socket, is_over: threading.Event) -> None:
    is_over.set()
    _cut(connected)
