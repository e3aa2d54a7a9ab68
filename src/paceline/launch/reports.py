"""How a rank tells its launcher why it ended: one small file, written before the process goes. Torch-free."""

import json
import os
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.config.errors import ConfigError
from paceline.files import write_whole
from paceline.launch.placement import REPORTS_VARIABLE, Placement

ELASTIC_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Where torchrun looks for the error of a rank that failed."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """Why a rank ended: one `line`, the traceback, and for a refusal every problem as `ConfigError`'s arguments.

    `unix_s` orders the reports.
    """

    rank: int
    unix_s: float
    line: str
    trace: str
    refusals: tuple[tuple[str, Any, str, str | None], ...] = ()


def write_report(
    error: BaseException, placement: Placement, environment: Mapping[str, str] = os.environ
) -> None:
    """Writes the error where the launcher that started this rank looks for one; other launchers look nowhere."""
    unix_s, line = time.time(), describe(error)
    trace = "".join(traceback.format_exception(error))
    if folder := environment.get(REPORTS_VARIABLE):
        problems = error.problems if isinstance(error, ConfigError) else ()
        refusals = tuple((p.key, p.value, p.rule, p.nearest) for p in problems)
        report = RankReport(placement.rank, unix_s, line, trace, refusals)
        write_whole(Path(folder) / f"rank{placement.rank}.json", json.dumps(asdict(report), default=str))
    elif path := environment.get(ELASTIC_VARIABLE):
        extra = {"py_callstack": trace, "timestamp": str(int(unix_s))}
        message = f"rank {placement.rank}: {line}"
        write_whole(Path(path), json.dumps({"message": {"message": message, "extraInfo": extra}}))


def read_reports(folder: Path) -> list[RankReport]:
    """All reports, by rank."""
    found = []
    for path in folder.glob("rank*.json"):
        raw = json.loads(path.read_text(encoding="utf-8"))
        found.append(RankReport(**raw | {"refusals": tuple(tuple(r) for r in raw["refusals"])}))
    return sorted(found, key=lambda report: report.rank)


def describe(error: BaseException) -> str:
    """One line: the error and, where it has one, the cause it was raised from."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    shown = _line(error)
    return shown if cause is error else f"{shown} (caused by {_line(cause)})"


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
