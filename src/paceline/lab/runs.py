"""Starts the runs of an ablation one at a time, each in a process of its own, and goes on after a crash.

A run counts as done when its own summary says so; everything else is started anew. An ablation that was killed may have
left its run going: that process holds the folder's lock until it ends, and a second start refuses to measure beside it.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.config import ConfigError, dump_config
from paceline.files import write_whole
from paceline.lab.arms import RECORDING
from paceline.lab.plan import RECORDING_FOLDER, Plan, PlannedRun
from paceline.lab.results import BASELINE, RunEntry, RunStatus
from paceline.telemetry.jsonl import open_append, read_lines

PLAN_FILE = "plan.json"
ATTEMPTS_FILE = "attempts.jsonl"
RECORD_VERSION = 1
MAX_FAILURES = 2
"""An arm that failed so often without a finished run is not started again."""

_REFUSED = 2
_EMPTY_MESSAGE = "ended without a message; see its log"


class AblationFailedError(RuntimeError):
    """The baseline, or the recording, cannot be run: there is nothing to compare with."""


def run_all(plan: Plan, say: Callable[[str], None], after_round: Callable[[], None]) -> None:
    """Brings every run of the plan to its end, skipping those that are done; `after_round` is called as rounds end.

    Raises:
        ConfigError: the folder holds another ablation, or a run of an earlier start is still going on in it.
        AblationFailedError: the baseline or the recording failed.
    """
    with _only_one(plan.folder) as lock, _ends_on_sigterm():
        _check_plan(plan)
        runs = plan.runs()
        for number, run in enumerate(runs):
            is_last_of_round = number + 1 == len(runs) or runs[number + 1].round != run.round
            if _is_pointless(plan, run):
                say(f"[{number + 1}/{len(runs)}] {run.name}: left out, {run.arm} cannot be run")
            elif not is_done(plan, run):
                say(f"[{number + 1}/{len(runs)}] {run.name}")
                entry = _run_once(plan, run, lock)
                if entry.status != "completed":
                    say(f"  {entry.status}: {entry.message}")
                if entry.status != "completed" and run.arm in (BASELINE, RECORDING):
                    raise AblationFailedError(f"{run.name} {entry.status}: {entry.message}")
            if is_last_of_round and run.round >= 0:
                after_round()


def entries(plan: Plan) -> tuple[RunEntry, ...]:
    """The state of every planned run, from the folder alone."""
    latest = {str(a["run"]): a for a in _attempts(plan)}
    found = []
    for run in plan.runs():
        attempt = latest.get(run.name)
        status: RunStatus = "pending"
        if is_done(plan, run):
            status = "completed"
        elif attempt is not None and attempt["status"] != "completed":
            status = attempt["status"]
        found.append(
            RunEntry(
                run.arm,
                run.round,
                run.position,
                f"runs/{run.name}",
                status,
                None if attempt is None else attempt["seconds"],
                "" if attempt is None or status == "completed" else attempt["message"],
            )
        )
    return tuple(found)


def run_dir(plan: Plan, run: PlannedRun) -> Path:
    """The folder of one run."""
    return plan.folder / "runs" / run.name


def is_done(plan: Plan, run: PlannedRun) -> bool:
    """Whether the run's own summary says that it completed."""
    path = run_dir(plan, run) / "summary.json"
    if not path.exists():
        return False
    return bool(json.loads(path.read_text(encoding="utf-8"))["status"] == "completed")


def _run_once(plan: Plan, run: PlannedRun, lock: int) -> RunEntry:
    """One process from start to end. What an earlier one left unfinished is removed first."""
    target = run_dir(plan, run)
    if target.exists():
        shutil.rmtree(target)
    if run.arm == RECORDING and (plan.folder / RECORDING_FOLDER).exists():
        shutil.rmtree(plan.folder / RECORDING_FOLDER)
    config, log = plan.folder / "configs" / f"{run.name}.yaml", plan.folder / "logs" / f"{run.name}.log"
    config.parent.mkdir(exist_ok=True)
    log.parent.mkdir(exist_ok=True)
    config.write_text(dump_config(plan.config(run)), encoding="utf-8")
    begin = time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        command = [sys.executable, "-m", "paceline", plan.command, str(config)]
        code = subprocess.run(command, stdout=output, stderr=output, pass_fds=(lock,), check=False).returncode
    seconds = time.monotonic() - begin
    status: RunStatus = "completed" if is_done(plan, run) else "refused" if code == _REFUSED else "failed"
    message = "" if status == "completed" else _last_line(log, code)
    with open_append(plan.folder / ATTEMPTS_FILE) as attempts:
        record = {
            "v": RECORD_VERSION,
            "run": run.name,
            "arm": run.arm,
            "status": status,
            "seconds": seconds,
            "message": message,
        }
        attempts.write(json.dumps(record) + "\n")
    return RunEntry(run.arm, run.round, run.position, f"runs/{run.name}", status, seconds, message)


def _last_line(log: Path, code: int) -> str:
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()]
    said = next((line for line in reversed(lines) if line), _EMPTY_MESSAGE)
    return said if code >= 0 else f"killed by {signal.Signals(-code).name}; last line: {said}"


def _attempts(plan: Plan) -> Iterator[dict[str, Any]]:
    path = plan.folder / ATTEMPTS_FILE
    return (record for record in (read_lines(path) if path.exists() else ()) if record is not None)


def _is_pointless(plan: Plan, run: PlannedRun) -> bool:
    """Whether the run's arm has been refused, or has failed too often, and never finished."""
    if any(is_done(plan, other) for other in plan.runs() if other.arm == run.arm):
        return False
    ended = [attempt["status"] for attempt in _attempts(plan) if attempt["arm"] == run.arm]
    is_required = run.arm in (BASELINE, RECORDING)  # it is the user who starts these again
    return not is_required and ("refused" in ended or ended.count("failed") >= MAX_FAILURES)


def _check_plan(plan: Plan) -> None:
    """Writes the plan's identity, or compares it with that of an earlier start."""
    path = plan.folder / PLAN_FILE
    identity = {"v": RECORD_VERSION, **plan.identity()}
    if not path.exists():
        write_whole(path, json.dumps(identity, indent=1) + "\n")
        return
    earlier = json.loads(path.read_text(encoding="utf-8"))
    if differing := [key for key in identity if earlier.get(key) != identity[key]]:
        rule = (
            f"holds an ablation with another {', '.join(differing)}; it can only be gone on with as it began"
        )
        raise ConfigError("--out", str(plan.folder), rule, "another folder")


@contextmanager
def _only_one(folder: Path) -> Iterator[int]:
    """A lock that this process and the run it has started hold together; gives its descriptor."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            rule = "is in use: another ablation, or a run that one has left behind, is still going on in it"
            raise ConfigError("--out", str(folder), rule, "wait for it, or end it") from None
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """SIGTERM raises here, so that the run under way is ended too."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
