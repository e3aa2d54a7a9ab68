"""process.json: which process writes a run's folder, how it ended if it could still say so, and how the run stands.

A killed process writes nothing more, so summary.json of its run says "running" for ever. Whether it still lives is
asked of the machine it ran on; from another machine that is not known, and the run is taken at its word.
"""

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from paceline.files import write_whole

PROCESS_FILE = "process.json"
RECORD_VERSION = 1

Outcome = Literal["", "refused", "failed", "ended"]

STATUS_TEXTS: dict[str, tuple[str, str]] = {
    "starting": ("starting", "启动中"),
    "running": ("running", "进行中"),
    "completed": ("completed", "已完成"),
    "failed": ("failed", "失败"),
    "stopped": ("stopped", "已停止"),
    "died": ("stopped without ending", "未正常结束即停止"),
    "refused": ("refused before starting", "启动前被拒绝"),
    "imported": ("imported", "导入"),
}
"""How a run stands (`run_status`), as people read it in English and in Chinese."""

_START_TOLERANCE_S = 60.0
"""A process that began this much later than the recorded one has its id by chance; a clock may be set by less."""


@dataclass(frozen=True, slots=True)
class RunProcess:
    """The newest process of a run. `outcome` is empty until it ends, and stays so where it was killed."""

    host: str
    pid: int
    started_unix_s: float
    outcome: Outcome = ""
    message: str = ""

    @property
    def is_gone(self) -> bool | None:
        """Whether it runs no more; None where another machine would have to be asked."""
        if self.outcome:
            return True
        if self.host != socket.gethostname():
            return None
        try:
            found = psutil.Process(self.pid)
            is_later = found.create_time() > self.started_unix_s + _START_TOLERANCE_S
            return is_later or found.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False  # there is one, and it is somebody else's


def this_process() -> RunProcess:
    """The process that asks."""
    return RunProcess(socket.gethostname(), os.getpid(), psutil.Process().create_time())


def write_process(run_dir: Path, process: RunProcess) -> None:
    """Replaces process.json."""
    text = json.dumps({"v": RECORD_VERSION, **asdict(process)}, indent=2)
    write_whole(run_dir / PROCESS_FILE, text + "\n")


def read_process(run_dir: Path) -> RunProcess | None:
    """The run's newest process; None where no process.json tells (older and imported runs)."""
    try:
        content: dict[str, Any] = json.loads((run_dir / PROCESS_FILE).read_text(encoding="utf-8"))
        if content.pop("v") != RECORD_VERSION:
            return None
        return RunProcess(**content)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a report of a damaged folder does without


def run_status(written: str, process: RunProcess | None, *, begun_anew: bool = False) -> str:
    """How a run stands, from what summary.json says (empty: there is none) and from its newest process.

    `begun_anew`: the process began after summary.json was written. `refused` is a first start that was refused, `died`
    a process that runs no more and has not said why; a refused attempt to go on leaves a run as it was.
    """
    is_open = begun_anew or written in ("", "running")
    if not is_open:
        return written
    if process is not None and process.outcome == "refused":
        return ("died" if written == "running" else written) or "refused"
    if process is not None and process.outcome == "failed":
        return "failed"
    if process is not None and process.is_gone:
        return "died"
    return "starting" if begun_anew or not written else written
