"""Reads what a growing file of JSON lines gained since last time."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

_HEAD_BYTES = 256


@dataclass(slots=True)
class NewLines:
    """`was_replaced`: the file is another one than last time (rotated, truncated, written anew), and `records` are all
    of its lines. `num_torn` counts lines that are no JSON object, which a killed process left half-written."""

    records: list[dict[str, Any]] = field(default_factory=list)
    was_replaced: bool = False
    num_torn: int = 0


@dataclass(slots=True)
class JsonlTail:
    """Follows one file, which need not exist yet. A last line without its end is left for the next time.

    Lines that contain `skip` are not parsed: most lines of a ledger are spans, and who wants its sections need not
    pay for those.
    """

    path: Path
    skip: bytes | None = None
    _offset: int = 0
    _inode: int = 0
    _head: bytes = field(default=b"", repr=False)

    def read(self) -> NewLines:
        """The complete lines that were added."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            had_lines = self._offset > 0
            self._offset, self._head = 0, b""
            return NewLines(was_replaced=had_lines)
        with file:
            new = NewLines(was_replaced=self._is_another(file))
            if new.was_replaced:
                self._offset = 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                self._take(line, new)
            file.seek(0)
            self._head = file.read(min(_HEAD_BYTES, self._offset))
            self._inode = self.path.stat().st_ino
        return new

    def _is_another(self, file: IO[bytes]) -> bool:
        """Whether what was read up to now is no longer what the file begins with."""
        if not self._offset:
            return False
        status = self.path.stat()
        moved = self._inode != status.st_ino or status.st_size < self._offset
        return moved or file.read(len(self._head)) != self._head

    def _take(self, line: bytes, new: NewLines) -> None:
        if self.skip is not None and self.skip in line:
            return
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            new.records.append(record)
        else:
            new.num_torn += 1
