"""The process that runs reward functions. It imports what the reward needs and nothing else; never torch by itself.

Messages in: first `WorkerSetup`, then lists of pickled jobs. Messages out: `Ready` or `Refused`, then one `Verdict`
per job, in order, each sent before the next job starts, so that the pool knows which job a silent worker is at.

Rewards run in the main thread, because some graders use signals. A second thread reads the socket; when the pool's
process is gone, however it went, the read ends and the worker ends with everything it started. A grader that holds
the interpreter's lock for ever would keep that thread from running, so a limit on CPU time backs it up.
"""

import importlib
import math
import numbers
import os
import pickle
import queue
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from paceline.config.errors import ConfigError
from paceline.rewards.channel import MessageReader, encode
from paceline.rewards.functions import RewardFunction, resolve
from paceline.types import RewardJob, RewardSpec, Verdict
from paceline.types.rewards import LARGEST_SCORE

TextFunction: TypeAlias = Callable[[RewardJob], str]


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The first message to a worker. With `gives_text` the spec's name is `module:factory`, and what the factory makes
    of the spec's parameters turns a job into a text: the verdict's message, with a score of 0."""

    spec: RewardSpec
    timeout_s: float
    gives_text: bool = False


@dataclass(frozen=True, slots=True)
class Ready:
    """The reward function is imported; jobs may come."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The reward function could not be imported."""

    message: str


def main(socket_fd: int) -> None:
    """Serves one pool until its end of the socket closes."""
    connection = socket.socket(fileno=socket_fd)
    batches: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, batches), daemon=True).start()
    setup: WorkerSetup = batches.get()
    try:
        run = partial(run_text_job, _text_function(setup.spec)) if setup.gives_text else None
        run = run or partial(run_job, resolve(setup.spec))
    except ConfigError as error:
        connection.sendall(encode(Refused(str(error))))
        return
    connection.sendall(encode(Ready()))
    # CPU time of all threads together cannot exceed wall time x CPUs: only a job whose pool has gone gets here.
    cpu_limit_s = (setup.timeout_s + 1) * ((os.cpu_count() or 1) + 1)
    while True:
        for pickled in batches.get():
            signal.setitimer(signal.ITIMER_VIRTUAL, cpu_limit_s)
            connection.sendall(encode(run(pickled)))


def run_job(function: RewardFunction, pickled: bytes) -> Verdict:
    """Scores one pickled `RewardJob`. Whatever the function does short of dying becomes a verdict."""
    started = time.perf_counter()
    try:
        job: RewardJob = pickle.loads(pickled)
        score = function(job.completion, answer=job.answer, metadata=job.metadata, prompt=job.prompt)
        message = _objection(score)
    # Users' code may raise anything, and a grader that calls sys.exit() must not end the worker: each is an error
    # of this one sample.
    except BaseException as error:
        return Verdict("error", None, time.perf_counter() - started, _describe(error))
    seconds = time.perf_counter() - started
    return Verdict("error", None, seconds, message) if message else Verdict("score", float(score), seconds)


def run_text_job(function: TextFunction, pickled: bytes) -> Verdict:
    """Runs one pickled `RewardJob` for its text. Whatever the function does short of dying becomes a verdict."""
    started = time.perf_counter()
    try:
        text = function(pickle.loads(pickled))
    except BaseException as error:  # as in run_job
        return Verdict("error", None, time.perf_counter() - started, _describe(error))
    return Verdict("score", 0.0, time.perf_counter() - started, text)


def _text_function(spec: RewardSpec) -> TextFunction:
    module, _, factory = spec.name.partition(":")
    made: TextFunction = vars(importlib.import_module(module))[factory](**spec.params)
    return made


def _objection(score: Any) -> str:
    if not isinstance(score, numbers.Real):
        return f"the reward returned {score!r} of type {type(score).__name__}, not a number"
    if not math.isfinite(score):
        return f"the reward returned {score!r}, which is not finite"
    if abs(float(score)) > LARGEST_SCORE:
        return f"the reward returned {score!r}, which is beyond what float32 holds ({LARGEST_SCORE:.2g})"
    return ""


def _describe(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


def _read(connection: socket.socket, batches: "queue.SimpleQueue[Any]") -> None:
    reader = MessageReader(connection)
    try:
        while True:
            for message in reader.read_blocking():
                batches.put(message)
    except (EOFError, ConnectionResetError):
        # The worker leads a process group of its own: whatever a grader started goes with it.
        os.killpg(os.getpgrp(), signal.SIGKILL)
