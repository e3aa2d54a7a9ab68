"""Completions to verdicts, in worker processes that can be killed."""

import contextlib
import pickle
import socket
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from paceline.rewards.dispatcher import Dispatcher, RewardPoolError
from paceline.rewards.process import PendingJob
from paceline.rewards.worker import WorkerSetup
from paceline.types import RewardJob, RewardSpec, Verdict

__all__ = ["PendingScore", "RewardJob", "RewardPool", "RewardPoolError", "RewardSpec", "reward_alarm"]

PendingScore: TypeAlias = "Future[Verdict]"
"""What `submit` returns; hand it to `gather`."""


class RewardPool:
    """`num_workers` processes that score with the reward function `spec` names.

    The constructor does not wait for them: they import the reward while the caller sets other things up. A scoring
    that takes longer than `timeout_s` seconds (from the moment a worker starts it; importing does not count) has its
    worker killed and replaced, and is a "timeout". A reward that raises, returns no finite number, or takes its
    worker down is an "error" that says so. Neither carries a score.

    With `gives_text` jobs give texts, not scores: see `worker.WorkerSetup`.

    What rewards print goes to `log_path`, or to stderr. May be used from any thread. Call `resolve(spec)` first to
    refuse a wrong name before workers start.
    """

    def __init__(
        self,
        spec: RewardSpec,
        num_workers: int,
        timeout_s: float,
        log_path: Path | None = None,
        gives_text: bool = False,
    ) -> None:
        if num_workers < 1 or not timeout_s > 0:
            raise ValueError(
                f"a pool needs a worker and a positive limit, not {num_workers} and {timeout_s} s"
            )
        self._log = log_path.open("ab") if log_path is not None else None
        self._wake_send, self._wake_receive = socket.socketpair()
        self._wake_send.setblocking(False)
        self._lock = threading.Lock()
        self._queue: deque[PendingJob] = deque()
        self._num_reported = 0
        self._is_closing = False
        self._failure: Exception | None = None
        stderr_fd = 2
        self._dispatcher = Dispatcher(
            WorkerSetup(spec, timeout_s, gives_text),
            num_workers,
            self._log.fileno() if self._log is not None else stderr_fd,
            self._queue,
            self._wake_receive,
            lambda: self._is_closing,
        )
        # A daemon, so that a forgotten pool does not keep the interpreter from ending; its workers end with it.
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()

    def submit(self, job: RewardJob) -> PendingScore:
        """Queues one job and returns at once. Raises `RewardPoolError` when the pool is closed or has failed."""
        return self._enqueue([job])[0]

    def gather(self, pending: Sequence[PendingScore]) -> list[Verdict]:
        """Waits for verdicts, in the order of `pending`. Raises `RewardPoolError` when the workers do not start."""
        return [handle.result() for handle in pending]

    def score(self, jobs: Sequence[RewardJob]) -> list[Verdict]:
        """One verdict per job, in order."""
        return self.gather(self._enqueue(jobs))

    def aborted(self) -> Verdict:
        """The verdict of a sample that is not whole and so was not submitted."""
        return aborted_verdict()

    def flush(self) -> None:
        """Nothing: a job goes to a worker the moment it is submitted."""

    def take_counts(self) -> Mapping[str, int]:
        """Workers replaced since the last call."""
        since, self._num_reported = self.num_replaced - self._num_reported, self.num_replaced
        return {"workers_replaced": since}

    @property
    def worker_pids(self) -> tuple[int, ...]:
        """Process ids of the present workers."""
        return tuple(worker.pid for worker in list(self._dispatcher.workers))

    @property
    def num_replaced(self) -> int:
        """Workers replaced so far because they hung or died."""
        return self._dispatcher.num_replaced

    def close(self) -> None:
        """Ends the workers; jobs without a verdict fail with `RewardPoolError`. May be called again."""
        self._is_closing = True
        self._wake()
        self._thread.join()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _enqueue(self, jobs: Sequence[RewardJob]) -> list[PendingScore]:
        # Pickled here, so that a job that cannot be is the caller's error and not a worker's.
        entries = [PendingJob(_pickled(job), Future()) for job in jobs]
        for entry in entries:
            entry.future.set_running_or_notify_cancel()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._queue.extend(entries)
        self._wake()
        return [entry.future for entry in entries]

    def _wake(self) -> None:
        # When the socket is full of wake-ups that nobody has read yet, one more would say nothing new.
        with contextlib.suppress(BlockingIOError):
            self._wake_send.send(b"\0")

    def _run(self) -> None:
        failure: Exception = RewardPoolError("the reward pool is closed")
        try:
            self._dispatcher.serve()
        # Whatever ended the loop must reach whoever waits for a verdict, or they would wait for ever.
        except Exception as error:
            failure = error
        abandoned = self._dispatcher.end_workers()
        with self._lock:
            self._failure = failure
            abandoned += self._queue
            self._queue.clear()
        for entry in abandoned:
            entry.future.set_exception(failure)


def aborted_verdict() -> Verdict:
    """No score: half a sample that counted as a bad one would move the advantages of the others of its prompt."""
    return Verdict("aborted", None, 0.0, "the sample was interrupted")


def _pickled(job: RewardJob) -> bytes:
    """Without the conversation, which no rule reads: worked examples would make every message many times longer."""
    bare = RewardJob(job.prompt, job.completion, job.answer, job.metadata) if job.messages else job
    return pickle.dumps(bare, pickle.HIGHEST_PROTOCOL)


def reward_alarm(verdicts: Sequence[Verdict]) -> str | None:
    """One sentence when a batch looks broken rather than hard, else None.

    Every score 0 (or no score at all) while some scorings failed is what a grader that does not work looks like.
    """
    scores = [verdict.score for verdict in verdicts if verdict.score is not None]
    failures = [verdict for verdict in verdicts if verdict.outcome in ("timeout", "error")]
    if not failures or any(scores):
        return None
    num_timeouts = sum(verdict.outcome == "timeout" for verdict in failures)
    return (
        f"all {len(scores)} scores of {len(verdicts)} samples are zero while {len(failures) - num_timeouts} "
        f"scorings failed and {num_timeouts} timed out; first failure: {failures[0].message}"
    )
