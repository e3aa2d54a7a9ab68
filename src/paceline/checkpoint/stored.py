"""A complete checkpoint, read back: whole tensors, or just the part a rank needs, whichever ranks wrote it."""

import math
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from paceline.checkpoint.errors import CorruptCheckpointError
from paceline.checkpoint.layout import TENSOR_SUFFIX, Manifest
from paceline.checkpoint.pieces import Held, Region, region_of

Place = tuple[str, tuple[int, ...]]
"""A file that holds a part of a tensor, and where the part begins, by dim."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint whose files have been verified. Tensors are on the host; they are read when asked for."""

    path: Path
    manifest: Manifest
    state: dict[str, Any]

    @cached_property
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Every tensor, whole, by group and name; tied ones share their memory."""
        found: dict[str, dict[str, Tensor]] = {}
        for group, places in self._places.items():
            with _Files(self.path) as files:
                found[group] = {name: _read(files, name, place, None) for name, place in places.items()}
            for alias, original in self.manifest.aliases[group].items():
                found[group][alias] = found[group][original]
        return found

    def like(self, group: str, targets: Mapping[str, Held]) -> dict[str, Tensor]:
        """For every target the numbers of its name that this rank holds: all of them, or those of its piece.

        Raises:
            KeyError: the checkpoint has no such group or name.
            CorruptCheckpointError: a tensor has another shape, or its parts leave a gap.
        """
        places, aliases = self._places[group], self.manifest.aliases[group]
        found = {}
        with _Files(self.path) as files:
            for name, target in targets.items():
                stored = aliases.get(name, name)
                found[name] = _read(files, stored, places[stored], region_of(target, with_check=False))
        return found

    @cached_property
    def _places(self) -> dict[str, dict[str, list[Place]]]:
        """Files and offsets of every stored tensor; the shape of a divided one is in the manifest."""
        found: dict[str, dict[str, list[Place]]] = {g: {} for g in self.manifest.aliases}
        for file in sorted(self.manifest.files):
            if not file.endswith(TENSOR_SUFFIX):
                continue
            group = file.partition(".")[0]
            divided = self.manifest.parts.get(group, {})
            with safe_open(self.path / file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # a reader, not a mapping
                    if name not in divided:
                        found[group][name] = [(file, (0,) * len(opened.get_slice(name).get_shape()))]
        for group, named in self.manifest.parts.items():
            for name, parts in named.items():
                found[group][name] = list(parts.places)
        return found


class _Files:
    """Files of one checkpoint, each opened once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack, self._opened = folder, ExitStack(), dict[str, Any]()

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def slice_of(self, file: str, name: str) -> Any:
        """A tensor of a file, to be read in part."""
        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(safe_open(self._folder / file, "pt"))
        return self._opened[file].get_slice(name)


def _read(files: _Files, name: str, places: list[Place], wanted: Region | None) -> Tensor:
    """The wanted region (None: all of it), put together from the parts that overlap it."""
    parts = [(files.slice_of(file, name), offsets) for file, offsets in places]
    shape = tuple(
        max(offsets[dim] + part.get_shape()[dim] for part, offsets in parts)
        for dim in range(len(parts[0][1]))
    )
    region = wanted or Region(shape, (0,) * len(shape), shape)
    if region.shape != shape:
        raise CorruptCheckpointError(f"{name} is stored with shape {shape}, and {region.shape} is needed")
    if region.is_whole and len(parts) == 1:
        whole: Tensor = parts[0][0][...]
        return whole
    nothing = (slice(0, 0),) * len(shape)
    result = torch.empty(region.sizes, dtype=parts[0][0][nothing].dtype)
    num_read = 0
    for part, offsets in parts:
        spans = _overlap(offsets, part.get_shape(), region)
        if spans is None:
            continue
        inside_part = tuple(slice(b - o, e - o) for (b, e), o in zip(spans, offsets, strict=True))
        inside_region = tuple(slice(b - o, e - o) for (b, e), o in zip(spans, region.offsets, strict=True))
        result[inside_region] = part[inside_part]
        num_read += math.prod(e - b for b, e in spans)
    if num_read != region.num_entries:
        raise CorruptCheckpointError(f"{name}: its parts hold {num_read} of {region.num_entries} numbers")
    return result


def _overlap(offsets: tuple[int, ...], sizes: list[int], region: Region) -> list[tuple[int, int]] | None:
    """Begin and end by dim of what a part and a region share, in the tensor's own places; None for nothing."""
    spans = [
        (max(o, w), min(o + s, w + t))
        for o, s, w, t in zip(offsets, sizes, region.offsets, region.sizes, strict=True)
    ]
    return spans if all(begin < end for begin, end in spans) else None
