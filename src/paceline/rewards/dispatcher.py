"""The loop that hands jobs to workers, takes verdicts, and replaces workers that hang or die.

It waits for three things at once: a message or the end of a worker, new jobs (a byte on the wake-up socket), and the
earliest deadline among running jobs. Nothing else blocks it.
"""

import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from math import ceil

from paceline.rewards.process import PendingJob, WorkerProcess
from paceline.rewards.worker import Ready, Refused, WorkerSetup
from paceline.types import Verdict

START_LIMIT_S = 120.0
"""A worker that has not imported the reward after so many seconds counts as a failed start."""

MAX_FAILED_STARTS = 3
"""So many failed starts in a row, and the pool gives up: the next would fail too."""

BATCH_SECONDS = 0.02
MAX_BATCH = 64
"""Jobs are sent together up to this many and up to this much expected work: enough to hide the cost of a message,
little enough that a job waits behind a hanging one only rarely."""


class RewardPoolError(RuntimeError):
    """The pool cannot score: its workers do not start, or it is closed."""


class Dispatcher:
    """Owns the workers. Everything here runs in one thread, except that `queue` is filled by others."""

    def __init__(
        self,
        setup: WorkerSetup,
        num_workers: int,
        output_fd: int,
        queue: deque[PendingJob],
        wake: socket.socket,
        is_closing: Callable[[], bool],
    ) -> None:
        self._setup = setup
        self._num_workers = num_workers
        self._output_fd = output_fd
        self._queue = queue
        self._wake = wake
        self._is_closing = is_closing
        self._selector = selectors.DefaultSelector()
        self._num_failed_starts = 0
        self._mean_job_s = BATCH_SECONDS
        self.workers: list[WorkerProcess] = []
        self.num_replaced = 0

    def serve(self) -> None:
        """Runs until closing. Raises `RewardPoolError` when workers do not start; call `end_workers` in any case."""
        self._selector.register(self._wake, selectors.EVENT_READ)
        for _ in range(self._num_workers):
            self._start_worker()
        while not self._is_closing():
            self._assign()
            for key, _ in self._selector.select(self._seconds_to_next_deadline()):
                if key.fileobj is self._wake:
                    self._wake.recv(4096)
                else:
                    self._receive(key.data)
            self._end_overdue()

    def end_workers(self) -> list[PendingJob]:
        """Ends every worker; returns the jobs that were with them."""
        abandoned: list[PendingJob] = []
        for worker in self.workers:
            abandoned += worker.assigned
            worker.end()
        self.workers.clear()
        self._selector.close()
        return abandoned

    def _start_worker(self) -> None:
        worker = WorkerProcess(self._setup, self._output_fd)
        self.workers.append(worker)
        self._selector.register(worker.socket, selectors.EVENT_READ, worker)

    def _assign(self) -> None:
        for worker in list(self.workers):
            if not worker.is_ready or worker.assigned or not self._queue:
                continue
            size = min(
                MAX_BATCH,
                int(BATCH_SECONDS / max(self._mean_job_s, 1e-9)),
                ceil(len(self._queue) / self._num_workers),
            )
            jobs = [self._queue.popleft() for _ in range(max(1, size))]
            if not worker.send(jobs):
                self._queue.extendleft(reversed(jobs))
                self._replace(worker)

    def _receive(self, worker: WorkerProcess) -> None:
        messages, has_closed = worker.receive()
        for message in messages:
            match message:
                case Verdict():
                    worker.since = time.monotonic()
                    self._deliver(worker.assigned.popleft(), message)
                case Ready():
                    worker.is_ready = True
                    self._num_failed_starts = 0
                case Refused():
                    raise RewardPoolError(message.message)
        if has_closed:
            self._bury(worker)

    def _deliver(self, job: PendingJob, verdict: Verdict) -> None:
        self._mean_job_s += 0.2 * (verdict.seconds - self._mean_job_s)
        job.future.set_result(verdict)

    def _bury(self, worker: WorkerProcess) -> None:
        """A worker ended by itself: its running job is an error, the jobs behind it go to others."""
        seconds = time.monotonic() - worker.since
        running = worker.assigned.popleft() if worker.assigned else None
        ending = self._replace(worker, has_closed=True)
        if running is not None:
            message = f"the reward worker (process {worker.pid}) {ending} while scoring"
            self._deliver(running, Verdict("error", None, seconds, message))

    def _end_overdue(self) -> None:
        now = time.monotonic()
        for worker in [worker for worker in self.workers if self._deadline(worker) <= now]:
            # The verdict may be here by now, unread because this thread got no turn.
            self._receive(worker)
            if worker not in self.workers or self._deadline(worker) > now:
                continue
            running = worker.assigned.popleft() if worker.assigned else None
            self._replace(worker)
            if running is not None:
                message = f"not scored within {self._setup.timeout_s:g} s; its worker was replaced"
                self._deliver(running, Verdict("timeout", None, now - worker.since, message))

    def _replace(self, worker: WorkerProcess, has_closed: bool = False) -> str:
        """Ends a worker, gives its remaining jobs back and starts another; returns how it ended."""
        self._selector.unregister(worker.socket)
        self.workers.remove(worker)
        self._queue.extendleft(reversed(worker.assigned))
        ending = worker.end(has_closed)
        if not worker.is_ready:
            self._num_failed_starts += 1
            if self._num_failed_starts >= MAX_FAILED_STARTS:
                raise RewardPoolError(
                    f"{self._num_failed_starts} reward workers in a row did not start (the last one {ending}); "
                    f"reward {self._setup.spec.name!r}"
                )
        self.num_replaced += 1
        self._start_worker()
        return ending

    def _deadline(self, worker: WorkerProcess) -> float:
        if not worker.is_ready:
            return worker.since + START_LIMIT_S
        return worker.since + self._setup.timeout_s if worker.assigned else float("inf")

    def _seconds_to_next_deadline(self) -> float | None:
        next_deadline = min(self._deadline(worker) for worker in self.workers)
        return None if next_deadline == float("inf") else max(0.0, next_deadline - time.monotonic())
