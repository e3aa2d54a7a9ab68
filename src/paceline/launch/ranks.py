"""Starts one process per device on this node, watches them, and says which one failed and why."""

import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, start_processes
from torch.distributed.elastic.multiprocessing.api import RunProcsResult

from paceline.config import Config, ConfigError, dump_config
from paceline.launch.devices import check_device_count, resolve_kind
from paceline.launch.placement import LAUNCHER_VARIABLE, REPORTS_VARIABLE
from paceline.launch.reports import read_reports
from paceline.launch.signals import StopRequest
from paceline.launch.stage_board import read_stage

_MODULE = "paceline"
"""Every rank runs `python -m` this."""

_POLL_S = 0.1
_STORE_TIMEOUT_S = 300.0


class RankFailedError(RuntimeError):
    """A rank ended before its time; the message names it and the cause, a note is its traceback if it left one."""

    def __init__(self, rank: int, cause: str, trace: str = "") -> None:
        self.rank = rank
        super().__init__(f"rank {rank}: {cause}")
        if trace:
            self.add_note(f"on rank {rank}: {trace}")


def run_on_ranks(config: Config, command: Sequence[str] = ("train",)) -> None:
    """Runs `paceline COMMAND` with this config on `cluster.num_devices` ranks and returns when all are done.

    SIGTERM and the first SIGINT are handed on as a request to stop at the next boundary, however long that takes; a
    second SIGINT ends the ranks. When one rank fails, the others are stopped: asked first, killed after 30 s.

    Raises:
        ConfigError: refused, here or by the ranks.
        RankFailedError: a rank failed while running.
        KeyboardInterrupt: interrupted twice.
    """
    check_device_count(resolve_kind(config.cluster.device), config.cluster.num_devices)
    with tempfile.TemporaryDirectory(prefix="paceline-ranks-") as name:
        folder = Path(name)
        recipe = folder / "config.yaml"
        recipe.write_text(dump_config(config), encoding="utf-8")
        # hosted here, so that it outlives any rank
        store = dist.TCPStore(  # type: ignore[attr-defined]  # exported, though not in __all__
            "127.0.0.1",
            0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=_STORE_TIMEOUT_S),
        )
        with StopRequest():  # its exit brings the caller's handlers back: starting processes replaces them
            context = _start(config.cluster.num_devices, store.port, folder, [*command, str(recipe)])
            with StopRequest() as stop:
                result = _watch(context, stop)
        _raise_failure(result, folder)


def _start(num_ranks: int, port: int, folder: Path, arguments: Sequence[str]) -> PContext:
    command = ("-m", _MODULE, *arguments)
    return start_processes(
        name="paceline",
        entrypoint=sys.executable,
        args=dict.fromkeys(range(num_ranks), command),
        envs={rank: _environment(rank, num_ranks, port, folder) for rank in range(num_ranks)},
        logs_specs=DefaultLogsSpecs(),
    )


def _environment(rank: int, num_ranks: int, port: int, folder: Path) -> dict[str, str]:
    variables = {
        "RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": num_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        REPORTS_VARIABLE: folder,
        LAUNCHER_VARIABLE: os.getpid(),
    }
    found = {name: str(value) for name, value in variables.items()}
    if "OMP_NUM_THREADS" not in os.environ:
        # every rank would start as many threads as there are cores
        found["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // num_ranks))
    # a reward function beside the script that called us must be found by the ranks too
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (sys.path[0], os.environ.get("PYTHONPATH"))))
    return found


def _watch(context: PContext, stop: StopRequest) -> RunProcsResult:
    """Waits for all ranks to end, or for one to fail; hands the request to stop on to them once."""
    handed_on = False
    try:
        while (result := context.wait(timeout=_POLL_S, period=_POLL_S)) is None:
            if stop.requested and not handed_on:
                _signal_all(context, signal.SIGTERM)
                handed_on = True
    except BaseException:  # a second SIGINT or anything else: no rank may be left behind; raised on
        context.close(signal.SIGKILL)
        raise
    return result


def _signal_all(context: PContext, number: signal.Signals) -> None:
    for pid in context.pids().values():
        try:
            os.kill(pid, number)
        except ProcessLookupError:  # it has ended meanwhile, and the next poll says how
            continue


def _raise_failure(result: RunProcsResult, folder: Path) -> None:
    """Finds the rank that failed first, and raises what it said.

    Of those that ended in the same second, one without a report comes first: it was killed, and what others report is
    what its end did to them. Those that the launcher stopped because of it come last.
    """
    if not result.is_failed():
        return
    reports = {report.rank: report for report in read_reports(folder)}

    def order(rank: int) -> tuple[int, bool, float]:
        failure = result.failures[rank]
        was_stopped = failure.exitcode == -signal.SIGTERM
        return failure.timestamp, was_stopped, reports[rank].unix_s if rank in reports else 0.0

    rank = min(result.failures, key=order)
    report = reports.get(rank)
    if report is None:
        stage = read_stage(folder, rank)
        where = f" in stage {stage}" if stage else ""
        raise RankFailedError(rank, f"{_ending(result.failures[rank].exitcode)}{where}")
    if report.refusals:
        raise ConfigError.join([ConfigError(*refusal) for refusal in report.refusals])
    raise RankFailedError(rank, report.line, report.trace)


def _ending(exit_code: int) -> str:
    if exit_code < 0:
        return f"ended by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code} and no reason given"
