"""Save and resume: written aside, completed by a marker, the previous one kept until then."""

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.errors import CheckpointError, CorruptCheckpointError
from paceline.checkpoint.folders import Folders
from paceline.checkpoint.layout import STATE_FILE, entries, read_manifest, verify
from paceline.checkpoint.ranks import Alone, Ranks, from_rank_zero, raise_together
from paceline.checkpoint.snapshot import Snapshot, TensorGroups, take_snapshot
from paceline.checkpoint.stored import Loaded
from paceline.checkpoint.writing import announce, await_others, read_others, write_marker, write_own_files


@dataclass(frozen=True, slots=True)
class Found:
    """The newest usable checkpoint, and the newer ones that are not, each with the reason."""

    path: Path
    step: int
    skipped: tuple[tuple[Path, str], ...]


class CheckpointStore:
    """The checkpoints of one run, which may have several ranks. One run at a time writes to a store.

    At every instant after the first save has finished, a loadable checkpoint exists: a new one is complete before
    the oldest goes. Saving waits for three things: the copy to host memory, an earlier save still being written,
    and, when not asynchronous, the writing. The writer thread consumes one snapshot, waits for the disk (on rank 0
    also for the other ranks' files), and is released by the last deletion; its error is raised by the next `save` or
    `wait`.

    Of several ranks each writes what it alone holds, and rank 0 completes the checkpoint when all have written; `save`,
    `latest` and `load` are then calls that all ranks make together, in a folder that all of them see. Any number of
    ranks can load what any other number has saved.
    """

    def __init__(
        self,
        directory: Path | str,
        keep: int,
        *,
        ranks: Ranks | None = None,
        others_timeout_s: float = 1800.0,
        after_write: Callable[[str], None] | None = None,
        on_written: Callable[[int, int], None] | None = None,
    ) -> None:
        """`on_written(start_ns, end_ns)` is told, in `time.perf_counter_ns`, when the writer thread worked.

        `keep` complete checkpoints stay. Rank 0 waits `others_timeout_s` for the other ranks' files.
        `after_write(event)` is called after every file, rename and deletion; it is there to inject faults."""
        if keep < 1:
            raise ValueError(f"keep = {keep}: at least one checkpoint must stay")
        self.directory = Path(directory)
        self.num_waits = 0
        """Saves that had to wait for an earlier one still being written."""
        self._ranks = ranks or Alone()
        self._others_timeout_s = others_timeout_s
        self._after_write = after_write or (lambda event: None)
        self._on_written = on_written or (lambda start_ns, end_ns: None)
        self._folders = Folders(self.directory, keep, self._after_write)
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
        self._wait_together()
        snapshot = take_snapshot(tensors, state, self._ranks)
        partial = Path(from_rank_zero(self._ranks, lambda: str(self._begin(step))))
        self._writer = threading.Thread(
            target=self._write_in_background, args=(partial, step, snapshot), name="checkpoint"
        )
        self._writer.start()
        if not asynchronous:
            self._wait_together()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Returns when this process is writing nothing any more; raises the error of its last save, once."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def latest(self) -> Found | None:
        """The newest checkpoint whose every file matches its marker, or None when there is no checkpoint at all.

        Raises:
            CheckpointError: there are checkpoints, and none is usable; the message gives each one's reason.
        """
        return from_rank_zero(self._ranks, self._find_latest)

    def load(self, path: Path | str) -> Loaded:
        """Opens a checkpoint whose files match their checksums; what it gives is bit-equal to what was saved.

        Raises:
            CorruptCheckpointError: incomplete or altered.
        """
        path = Path(path)
        from_rank_zero(self._ranks, lambda: verify(path, read_manifest(path)))
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
        return Loaded(path, read_manifest(path), state)

    def _wait_together(self) -> None:
        error: Exception | None = None
        try:
            self.wait()
        except Exception as raised:  # whatever it is, the other ranks must not go on saving; raised on below
            error = raised
        raise_together(self._ranks, error)

    def _find_latest(self) -> Found | None:
        skipped: list[tuple[Path, str]] = []
        for entry in entries(self.directory):
            if entry.kind == "old":
                continue
            try:
                verify(entry.path, read_manifest(entry.path))
            except CorruptCheckpointError as error:
                skipped.append((entry.path, str(error).removeprefix(f"{entry.path}: ")))
            else:
                return Found(entry.path, entry.step, tuple(skipped))
        if any(path.name.startswith("step_") and ".tmp-" not in path.name for path, _ in skipped):
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in skipped)
            raise CheckpointError(f"{self.directory}: no usable checkpoint ({reasons})")
        return None

    def _begin(self, step: int) -> Path:
        """On rank 0: clears what dead processes left, and makes the folder that all ranks write into."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._folders.tidy()
        partial = self._folders.partial(step, os.getpid())
        partial.mkdir()
        return partial

    def _write_in_background(self, partial: Path, step: int, snapshot: Snapshot) -> None:
        start_ns = time.perf_counter_ns()
        try:
            if self._ranks.rank == 0:
                self._write(partial, step, snapshot)
            else:
                self._write_part(partial, snapshot)
            self._on_written(start_ns, time.perf_counter_ns())
        except BaseException as error:  # raised again in the caller's thread, by wait()
            self._error = error

    def _write(self, partial: Path, step: int, snapshot: Snapshot) -> None:
        world_size, limit_s = self._ranks.world_size, self._others_timeout_s
        try:
            try:
                own = write_own_files(partial, snapshot, 0, world_size, self._after_write)
            finally:  # also where ours failed: nobody may still write into a folder that is being removed
                silent = await_others(partial, world_size, limit_s)
            others = read_others(partial, world_size, silent, limit_s)
            write_marker(partial, step, [own, *others], self._after_write)
        except BaseException:  # whatever stopped the write, a partial folder must not stay behind; raised on
            # the first error is the one to show; what a silent rank still writes is cleared by the next save
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._folders.publish(partial, step)
        self._folders.delete_old(step)

    def _write_part(self, partial: Path, snapshot: Snapshot) -> None:
        rank = self._ranks.rank
        try:
            written = write_own_files(partial, snapshot, rank, self._ranks.world_size, self._after_write)
            announce(partial, rank, written)
        except BaseException as error:  # rank 0 is waiting for this rank's word, whatever it is; raised on
            if partial.is_dir():
                announce(partial, rank, None, f"{type(error).__name__}: {error}")
            raise
