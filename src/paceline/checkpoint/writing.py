"""One rank's files of a checkpoint, and how rank 0 learns that the others have theirs on disk.

Ranks meet in the folder itself, which they share: the thread that writes may not join a collective, because the main
thread is in the middle of others. A rank's `rank{r}.done` (or `.failed`) appears when its files are on disk.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from paceline.checkpoint.errors import CheckpointError
from paceline.checkpoint.layout import (
    FORMAT_VERSION,
    MARKER,
    STATE_FILE,
    TENSOR_SUFFIX,
    FileRecord,
    Manifest,
    Parts,
    file_record,
    fsync,
)
from paceline.checkpoint.snapshot import Snapshot

_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class RankFiles:
    """What one rank has written: its files, the names that share memory, and its parts of divided tensors as
    group -> name -> (shape, file, offsets)."""

    files: dict[str, FileRecord]
    aliases: dict[str, dict[str, str]]
    parts: dict[str, dict[str, tuple[tuple[int, ...], str, tuple[int, ...]]]]


def write_own_files(
    folder: Path, snapshot: Snapshot, rank: int, world_size: int, after_write: Callable[[str], None]
) -> RankFiles:
    """Writes this rank's tensors, and on rank 0 the scalars; returns when they are on disk."""
    files: dict[str, FileRecord] = {}
    parts: dict[str, dict[str, tuple[tuple[int, ...], str, tuple[int, ...]]]] = {}

    def finish(name: str) -> None:
        fsync(folder / name)
        files[name] = file_record(folder / name)
        after_write(name)

    for group, named in snapshot.tensors.items():
        name = f"{group}{TENSOR_SUFFIX}" if world_size == 1 else f"{group}.rank{rank}{TENSOR_SUFFIX}"
        parts[group] = {
            tensor: (region.shape, name, region.offsets)
            for tensor, region in snapshot.regions[group].items()
            if not region.is_whole
        }
        if named or world_size == 1:
            save_file(named, folder / name)
            finish(name)
    if rank == 0:
        (folder / STATE_FILE).write_text(snapshot.state_text, encoding="utf-8")
        finish(STATE_FILE)
    return RankFiles(files, snapshot.aliases, parts)


def announce(folder: Path, rank: int, written: RankFiles | None, failure: str = "") -> None:
    """Tells rank 0 what this rank has written, or that it could not."""
    name = f"rank{rank}.failed" if written is None else f"rank{rank}.done"
    draft = folder / f"{name}.draft"
    try:
        draft.write_text(failure if written is None else json.dumps(asdict(written)), encoding="utf-8")
    except OSError:
        if written is not None or not draft.exists():
            raise
        # a full disk takes no reason, but a name: rank 0 need not wait for its time limit
    os.replace(draft, folder / name)


def await_others(folder: Path, world_size: int, timeout_s: float) -> list[int]:
    """Waits until ranks 1 and up have announced what they wrote or that they could not; returns those that have not
    within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    silent = list(range(1, world_size))
    while True:
        silent = [rank for rank in silent if not _has_announced(folder, rank)]
        if not silent or time.monotonic() > deadline:
            return silent
        time.sleep(_POLL_S)


def read_others(folder: Path, world_size: int, silent: list[int], timeout_s: float) -> list[RankFiles]:
    """What ranks 1 and up have written; their announcements are removed.

    Raises:
        CheckpointError: a rank failed, or those in `silent` have not announced anything in time; they are named.
    """
    for rank in range(1, world_size):
        if (failed := folder / f"rank{rank}.failed").exists():
            reason = failed.read_text(encoding="utf-8") or "nor the reason; see that rank's own error"
            raise CheckpointError(f"rank {rank} could not write its part: {reason}")
    if silent:
        raise CheckpointError(f"ranks {silent} have not written their parts within {timeout_s:g} s")
    found = []
    for rank in range(1, world_size):
        path = folder / f"rank{rank}.done"
        found.append(_rank_files(json.loads(path.read_text(encoding="utf-8"))))
        path.unlink()
    return found


def _has_announced(folder: Path, rank: int) -> bool:
    return any((folder / f"rank{rank}.{end}").exists() for end in ("done", "failed"))


def write_marker(
    folder: Path, step: int, written: list[RankFiles], after_write: Callable[[str], None]
) -> None:
    """Completes the checkpoint with what all ranks, in their order, have written."""
    files: dict[str, FileRecord] = {}
    aliases: dict[str, dict[str, str]] = {}
    places: dict[str, dict[str, list[tuple[str, tuple[int, ...]]]]] = {}
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    for rank_files in written:
        files |= rank_files.files
        for group, named in rank_files.aliases.items():
            aliases.setdefault(group, {}).update(named)
        for group, divided in rank_files.parts.items():
            for name, (shape, file, offsets) in divided.items():
                shapes[group, name] = shape
                places.setdefault(group, {}).setdefault(name, []).append((file, offsets))
    parts = {
        group: {name: Parts(shapes[group, name], tuple(found)) for name, found in named.items()}
        for group, named in places.items()
    }
    manifest = Manifest(FORMAT_VERSION, step, len(written), files, aliases, parts)
    # the marker too appears at once: a torn one would make an otherwise complete checkpoint unreadable
    draft = folder / f"{MARKER}.draft"
    draft.write_text(manifest.to_json(), encoding="utf-8")
    fsync(draft)
    draft.rename(folder / MARKER)
    fsync(folder)
    after_write(MARKER)


def _rank_files(raw: Mapping[str, Any]) -> RankFiles:
    files = {name: FileRecord(**record) for name, record in raw["files"].items()}
    parts = {
        group: {name: (tuple(shape), file, tuple(offsets)) for name, (shape, file, offsets) in named.items()}
        for group, named in raw["parts"].items()
    }
    return RankFiles(files, raw["aliases"], parts)
