"""Names on disk and the completion marker.

    checkpoints/step_{n}/{group}.safetensors   one file per group of tensors
    checkpoints/step_{n}/{group}.rank{r}.safetensors   the same from several ranks: what rank r wrote
    checkpoints/step_{n}/state.json            everything that is not a tensor
    checkpoints/step_{n}/COMPLETE              written last: size and SHA-256 of every other file

A checkpoint is written as `step_{n}.tmp-{pid}` and renamed when its marker is on disk. Its marker alone makes it
complete: between marker and rename it counts already, so a re-save of the same step never leaves a gap. One on its
way out is first renamed to `step_{n}.old-{pid}`, so that a half-deleted folder is never taken for a checkpoint.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from paceline.checkpoint.errors import CorruptCheckpointError

FORMAT_VERSION = 1
MARKER = "COMPLETE"
STATE_FILE = "state.json"
TENSOR_SUFFIX = ".safetensors"

_NAME = re.compile(r"^step_(?P<step>\d+)(?:\.(?P<kind>tmp|old)-(?P<pid>\d+))?$")

Kind = Literal["final", "tmp", "old"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One folder of the store: the step it holds, whether it is final, and who was writing or deleting it."""

    path: Path
    step: int
    kind: Kind
    pid: int | None


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What a file must be: its size in bytes and the SHA-256 of its content."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Parts:
    """A tensor of `shape` in parts: the file each lies in (under the tensor's name) and where it begins, by dim."""

    shape: tuple[int, ...]
    places: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The completion marker's content.

    `aliases[group][name]` is the tensor of the same group that `name` shares its memory with (tied weights).
    `parts[group][name]` says where the parts of a tensor lie that no file holds whole.
    """

    version: int
    step: int
    world_size: int
    files: Mapping[str, FileRecord]
    aliases: Mapping[str, Mapping[str, str]]
    parts: Mapping[str, Mapping[str, Parts]] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, sort_keys=True)


def entries(directory: Path) -> list[Entry]:
    """The store's folders, newest step first and final ones before others. Foreign names are left alone."""
    if not directory.is_dir():
        return []
    found: list[Entry] = []
    for path in directory.iterdir():
        if match := _NAME.match(path.name):
            kinds: dict[str | None, Kind] = {None: "final", "tmp": "tmp", "old": "old"}
            pid = int(match["pid"]) if match["pid"] else None
            found.append(Entry(path, int(match["step"]), kinds[match["kind"]], pid))
    return sorted(found, key=lambda entry: (-entry.step, entry.kind != "final", entry.path.name))


def read_manifest(path: Path) -> Manifest:
    """The marker of a checkpoint folder. Raises `CorruptCheckpointError` with the reason when there is no valid one."""
    try:
        raw = json.loads((path / MARKER).read_text(encoding="utf-8"))
        if raw["version"] != FORMAT_VERSION:
            raise CorruptCheckpointError(
                f"{path}: format version {raw['version']}, this reads {FORMAT_VERSION}"
            )
        files = {name: FileRecord(**record) for name, record in raw["files"].items()}
        parts = {
            group: {name: _parts(value) for name, value in named.items()}
            for group, named in raw.get("parts", {}).items()
        }
        return Manifest(raw["version"], raw["step"], raw["world_size"], files, raw["aliases"], parts)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptCheckpointError(f"{path}: no {MARKER} marker, the save did not finish") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{path}: unreadable {MARKER} marker ({error!r})") from error


def _parts(raw: Mapping[str, Any]) -> Parts:
    return Parts(tuple(raw["shape"]), tuple((file, tuple(offsets)) for file, offsets in raw["places"]))


def verify(path: Path, manifest: Manifest) -> None:
    """Compares every file with the marker.

    Raises:
        CorruptCheckpointError: a file is missing or differs.
    """
    for name, expected in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CorruptCheckpointError(f"{path}: {name} is missing")
        if (num_bytes := file.stat().st_size) != expected.num_bytes:
            raise CorruptCheckpointError(f"{path}: {name} has {num_bytes} bytes, not {expected.num_bytes}")
        if file_record(file).sha256 != expected.sha256:
            raise CorruptCheckpointError(f"{path}: {name} does not match its checksum")


def file_record(path: Path) -> FileRecord:
    """Size and checksum of a file as it is now."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    return FileRecord(path.stat().st_size, digest.hexdigest())


def fsync(path: Path) -> None:
    """Waits until a file's content, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
