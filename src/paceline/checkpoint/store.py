"""Save and resume: written aside, completed by a marker, the previous one kept until then."""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.checkpoint.errors import CheckpointError, CorruptCheckpointError, WorldSizeError
from paceline.checkpoint.layout import (
    FORMAT_VERSION,
    MARKER,
    STATE_FILE,
    TENSOR_SUFFIX,
    Entry,
    FileRecord,
    Manifest,
    entries,
    file_record,
    fsync,
    read_manifest,
    verify,
)
from paceline.checkpoint.snapshot import Snapshot, TensorGroups, take_snapshot


@dataclass(frozen=True, slots=True)
class Found:
    """The newest usable checkpoint, and the newer ones that are not, each with the reason."""

    path: Path
    step: int
    skipped: tuple[tuple[Path, str], ...]


class Loaded(NamedTuple):
    """Tensors by group and name, on the host, and the scalars."""

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


class CheckpointStore:
    """The checkpoints of one run. One process at a time writes to a store.

    At every instant after the first save has finished, a loadable checkpoint exists: a new one is complete before
    the oldest goes. Saving waits for three things: the copy to host memory, an earlier save still being written,
    and, when not asynchronous, the writing. The writer thread consumes one snapshot, waits for the disk only, and
    is released by the last deletion; its error is raised by the next `save` or `wait`.
    """

    def __init__(
        self,
        directory: Path | str,
        keep: int,
        *,
        world_size: int = 1,
        after_write: Callable[[str], None] | None = None,
        on_written: Callable[[int, int], None] | None = None,
    ) -> None:
        """`on_written(start_ns, end_ns)` is told, in `time.perf_counter_ns`, when the writer thread worked.

        `keep` complete checkpoints stay. `after_write(event)` is called after every file, rename and deletion;
        it is there to inject faults."""
        if keep < 1:
            raise ValueError(f"keep = {keep}: at least one checkpoint must stay")
        self.directory = Path(directory)
        self.keep = keep
        self.world_size = world_size
        self.num_waits = 0
        """Saves that had to wait for an earlier one still being written."""
        self._after_write = after_write or (lambda event: None)
        self._on_written = on_written or (lambda start_ns, end_ns: None)
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self, step: int, tensors: TensorGroups, state: Mapping[str, Any], *, asynchronous: bool
    ) -> float:
        """Saves the state after `step` steps; returns the seconds the caller was blocked.

        `tensors` maps a group (its file's name) to named tensors; `state` is JSON: text keys, finite numbers.

        Raises:
            NonFiniteStateError: the state holds NaN or infinity; nothing is written.
            CheckpointError, OSError: this save (not asynchronous) or the one before it failed; the partial one is
                removed and earlier checkpoints are intact.
        """
        began = time.perf_counter()
        if self._writer is not None and self._writer.is_alive():
            self.num_waits += 1
        self.wait()
        snapshot = take_snapshot(tensors, state)
        self._writer = threading.Thread(
            target=self._write_in_background, args=(step, snapshot), name="checkpoint"
        )
        self._writer.start()
        if not asynchronous:
            self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Returns when nothing is being written any more; raises the error of the last save, once."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def latest(self) -> Found | None:
        """The newest checkpoint whose every file matches its marker, or None when there is no checkpoint at all.

        Raises:
            WorldSizeError: the newest intact checkpoint is of another number of ranks.
            CheckpointError: there are checkpoints, and none is usable; the message gives each one's reason.
        """
        skipped: list[tuple[Path, str]] = []
        for entry in entries(self.directory):
            if entry.kind == "old":
                continue
            try:
                verify(entry.path, read_manifest(entry.path), self.world_size)
            except CorruptCheckpointError as error:
                skipped.append((entry.path, str(error).removeprefix(f"{entry.path}: ")))
            else:
                return Found(entry.path, entry.step, tuple(skipped))
        if any(path.name.startswith("step_") and ".tmp-" not in path.name for path, _ in skipped):
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in skipped)
            raise CheckpointError(f"{self.directory}: no usable checkpoint ({reasons})")
        return None

    def load(self, path: Path | str) -> Loaded:
        """Reads a checkpoint whose files match their checksums; bit-equal to what was saved.

        Raises:
            WorldSizeError: saved on another number of ranks.
            CorruptCheckpointError: incomplete or altered.
        """
        path = Path(path)
        manifest = read_manifest(path)
        verify(path, manifest, self.world_size)
        tensors: dict[str, dict[str, Tensor]] = {}
        for name in manifest.files:
            if name.endswith(TENSOR_SUFFIX):
                group = name.removesuffix(TENSOR_SUFFIX)
                tensors[group] = load_file(path / name)
                for alias, original in manifest.aliases[group].items():
                    tensors[group][alias] = tensors[group][original]
        return Loaded(tensors, json.loads((path / STATE_FILE).read_text(encoding="utf-8")))

    def _write_in_background(self, step: int, snapshot: Snapshot) -> None:
        start_ns = time.perf_counter_ns()
        try:
            self._write(step, snapshot)
            self._on_written(start_ns, time.perf_counter_ns())
        except BaseException as error:  # raised again in the caller's thread, by wait()
            self._error = error

    def _write(self, step: int, snapshot: Snapshot) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._tidy()
        partial = self.directory / f"step_{step}.tmp-{os.getpid()}"
        partial.mkdir()
        try:
            self._write_files(partial, step, snapshot)
        except BaseException:  # whatever stopped the write, a partial folder must not stay behind; raised on
            shutil.rmtree(partial)
            raise
        self._publish(partial, step)
        self._delete_old(step)

    def _write_files(self, partial: Path, step: int, snapshot: Snapshot) -> None:
        files: dict[str, FileRecord] = {}
        for group, named in snapshot.tensors.items():
            save_file(named, partial / f"{group}{TENSOR_SUFFIX}")
            self._finish_file(partial / f"{group}{TENSOR_SUFFIX}", files)
        (partial / STATE_FILE).write_text(snapshot.state_text, encoding="utf-8")
        self._finish_file(partial / STATE_FILE, files)
        manifest = Manifest(FORMAT_VERSION, step, self.world_size, files, snapshot.aliases)
        # the marker too appears at once: a torn one would make an otherwise complete checkpoint unreadable
        draft = partial / f"{MARKER}.draft"
        draft.write_text(manifest.to_json(), encoding="utf-8")
        fsync(draft)
        draft.rename(partial / MARKER)
        fsync(partial)
        self._after_write(MARKER)

    def _finish_file(self, path: Path, files: dict[str, FileRecord]) -> None:
        fsync(path)
        files[path.name] = file_record(path)
        self._after_write(path.name)

    def _publish(self, partial: Path, step: int) -> None:
        final = self.directory / f"step_{step}"
        if _exists(final):
            self._delete(final)
        partial.rename(final)
        fsync(self.directory)
        self._after_write("rename")

    def _delete_old(self, step: int) -> None:
        """Deletes what is beyond `keep`, counted over restarts, and what cannot be loaded.

        The checkpoint just saved counts as the newest. Later ones that are damaged are what a resume has passed
        over; later ones that are intact belong to nobody this store knows, so they stay and are not counted.
        """
        num_kept = 0
        for entry in entries(self.directory):
            if entry.kind != "final":
                continue
            if entry.step > step:
                superfluous = not self._is_intact(entry)
            else:
                superfluous = num_kept == self.keep or not _has_marker(entry)
                num_kept += not superfluous
            if superfluous:
                self._delete(entry.path)

    def _is_intact(self, entry: Entry) -> bool:
        try:
            verify(entry.path, read_manifest(entry.path), self.world_size)
        except CorruptCheckpointError:
            return False
        except WorldSizeError:
            return True  # whole, if not for this run
        return True

    def _delete(self, path: Path) -> None:
        leaving = path.with_name(f"{path.name.partition('.')[0]}.old-{os.getpid()}")
        if _exists(leaving):
            _remove(leaving)
        path.rename(leaving)
        self._after_write(f"unlist {path.name}")
        _remove(leaving)
        self._after_write(f"delete {path.name}")

    def _tidy(self) -> None:
        """Finishes or clears what processes that no longer run have left behind."""
        for entry in entries(self.directory):
            if entry.kind == "final" or not _is_abandoned(entry):
                continue
            final = self.directory / f"step_{entry.step}"
            if entry.kind == "tmp" and _has_marker(entry) and not _exists(final):
                entry.path.rename(final)
            else:
                _remove(entry.path)


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
