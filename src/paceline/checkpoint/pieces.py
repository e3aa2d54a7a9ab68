"""Which part of a tensor a rank holds, and which rank writes it."""

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.checkpoint.errors import CheckpointError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A box of a tensor of `shape`: `sizes` entries from `offsets` on, by dim.

    `check` is a sum over the bits of a tensor that a rank holds whole; it must be the same wherever it is held.
    """

    shape: Shape
    offsets: Shape
    sizes: Shape
    check: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.sizes == self.shape

    @property
    def num_entries(self) -> int:
        """Numbers in it."""
        return math.prod(self.sizes)


Layout = Mapping[tuple[str, str], Region]
"""What one rank holds, by group and name."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A rank's part of a tensor of `shape`: `local` lies at `offsets` in it, by dim."""

    local: Tensor
    shape: Shape
    offsets: Shape


Held = Tensor | Piece
"""What a rank holds under a name: the whole tensor, or its piece of one."""


def region_of(held: Held, with_check: bool) -> Region:
    """Where it lies in its tensor."""
    if isinstance(held, Piece):
        return Region(held.shape, held.offsets, tuple(held.local.shape))
    shape = tuple(held.shape)
    return Region(shape, (0,) * len(shape), shape, _bit_sum(held) if with_check else None)


def local_of(held: Held) -> Tensor:
    """The numbers themselves, as they are on this rank."""
    return held.local if isinstance(held, Piece) else held


def written_by(layouts: Sequence[Layout], rank: int) -> set[tuple[str, str]]:
    """What `rank` writes: each distinct part is written once, by one of its holders, chosen so that bytes spread.

    Raises:
        CheckpointError: ranks hold a tensor whole, and not the same one.
    """
    mine: set[tuple[str, str]] = set()
    for key, region in layouts[rank].items():
        holders = [other for other, layout in enumerate(layouts) if _same_part(layout.get(key), region)]
        if region.is_whole:
            _check_equal(key, layouts, holders)
        elif not region.num_entries:
            continue
        if holders[zlib.crc32(key[1].encode()) % len(holders)] == rank:
            mine.add(key)
    return mine


def _same_part(other: Region | None, region: Region) -> bool:
    return other is not None and (other.offsets, other.sizes) == (region.offsets, region.sizes)


def _check_equal(key: tuple[str, str], layouts: Sequence[Layout], holders: Sequence[int]) -> None:
    checks = {holder: layouts[holder][key].check for holder in holders}
    other = [holder for holder in holders if checks[holder] != checks[holders[0]]]
    if other:
        raise CheckpointError(
            f"{'/'.join(key)} differs between ranks {holders[0]} and {other[0]}, and neither holds it as a shard: "
            "saving one of the two would lose the other; nothing was saved"
        )


def _bit_sum(tensor: Tensor) -> int:
    if not tensor.numel():
        return 0
    as_bytes = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return int(as_bytes.sum(dtype=torch.int64))
