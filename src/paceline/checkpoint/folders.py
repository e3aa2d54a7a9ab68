"""The folders of a store: published at once, the oldest deleted after, what dead processes left cleared."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil

from paceline.checkpoint.errors import CorruptCheckpointError
from paceline.checkpoint.layout import MARKER, Entry, entries, fsync, read_manifest, verify


class Folders:
    """One process at a time changes them: rank 0 of the run, while it saves."""

    def __init__(self, directory: Path, keep: int, after_write: Callable[[str], None]) -> None:
        self.directory, self.keep, self._after_write = directory, keep, after_write

    def partial(self, step: int, pid: int) -> Path:
        """Where process `pid` (rank 0) collects the checkpoint of `step`."""
        return self.directory / f"step_{step}.tmp-{pid}"

    def publish(self, partial: Path, step: int) -> None:
        """Gives a complete folder its name; an earlier checkpoint of the step goes first."""
        final = self.directory / f"step_{step}"
        if _exists(final):
            self._delete(final)
        partial.rename(final)
        fsync(self.directory)
        self._after_write("rename")

    def delete_old(self, step: int) -> None:
        """Deletes what is beyond `keep`, counted over restarts, and what cannot be loaded.

        The checkpoint just saved counts as the newest. Later ones that are damaged are what a resume has passed
        over; later ones that are intact belong to nobody this store knows, so they stay and are not counted.
        """
        num_kept = 0
        for entry in entries(self.directory):
            if entry.kind != "final":
                continue
            if entry.step > step:
                superfluous = not _is_intact(entry)
            else:
                superfluous = num_kept == self.keep or not _has_marker(entry)
                num_kept += not superfluous
            if superfluous:
                self._delete(entry.path)

    def tidy(self) -> None:
        """Finishes or clears what processes that no longer run have left behind."""
        for entry in entries(self.directory):
            if entry.kind == "final" or not _is_abandoned(entry):
                continue
            final = self.directory / f"step_{entry.step}"
            if entry.kind == "tmp" and _has_marker(entry) and not _exists(final):
                entry.path.rename(final)
            else:
                _remove(entry.path)

    def _delete(self, path: Path) -> None:
        leaving = path.with_name(f"{path.name.partition('.')[0]}.old-{os.getpid()}")
        if _exists(leaving):
            _remove(leaving)
        path.rename(leaving)
        self._after_write(f"unlist {path.name}")
        _remove(leaving)
        self._after_write(f"delete {path.name}")


def _is_intact(entry: Entry) -> bool:
    try:
        verify(entry.path, read_manifest(entry.path))
    except CorruptCheckpointError:
        return False
    return True


def _has_marker(entry: Entry) -> bool:
    return (entry.path / MARKER).is_file()


def _is_abandoned(entry: Entry) -> bool:
    """Whether the process named in the folder has ended, or is another one that got its id later."""
    if entry.pid is None or entry.pid == os.getpid():
        return True  # this process writes one checkpoint at a time and is not writing now
    try:
        return psutil.Process(entry.pid).create_time() > entry.path.lstat().st_mtime
    except psutil.NoSuchProcess:
        return True


def _exists(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
