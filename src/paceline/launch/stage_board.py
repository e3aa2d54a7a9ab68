"""The stage a rank is in, kept where its launcher can read it after the rank has been killed. Torch-free."""

import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from paceline.launch.placement import REPORTS_VARIABLE, Placement

_SIZE = 32


class StageBoard:
    """A memory-mapped line: writing it costs a copy of a few bytes, and it survives SIGKILL."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._line = mmap.mmap(file.fileno(), _SIZE)

    def show(self, stage: str) -> None:
        """`stage` begins."""
        self._line[:] = stage.encode()[:_SIZE].ljust(_SIZE, b"\0")


def open_board(
    placement: Placement | None, environment: Mapping[str, str] = os.environ
) -> Callable[[str], None] | None:
    """What a ledger calls where an outermost span begins; None without paceline's own launcher, its only reader."""
    folder = environment.get(REPORTS_VARIABLE)
    if placement is None or folder is None:
        return None
    return StageBoard(_path(Path(folder), placement.rank)).show


def read_stage(folder: Path, rank: int) -> str | None:
    """The last stage a rank showed; None when it showed none."""
    path = _path(folder, rank)
    return path.read_bytes().rstrip(b"\0").decode() or None if path.exists() else None


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.stage"
