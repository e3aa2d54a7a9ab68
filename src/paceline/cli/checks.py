"""A line of `paceline doctor`: what was looked at, the verdict, what was found, and what to do about it."""

import os
import sys
from dataclasses import asdict, dataclass
from typing import Literal

Status = Literal["OK", "WARN", "FAIL"]
OK: Status = "OK"
WARN: Status = "WARN"
FAIL: Status = "FAIL"


@dataclass(frozen=True, slots=True)
class Check:
    """One line: what was looked at, the verdict, what was found, and what to do about it."""

    name: str
    status: Status
    found: str
    advice: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
