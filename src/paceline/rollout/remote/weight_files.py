"""Weights on their way to another process: safetensors files in a folder both sides see, or handles of tensors."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import Tensor

from paceline.rollout.vllm.ipc import ipc_handles

BUCKET_BYTES = 2**30
"""A file is closed once it holds this much: a reader loads file by file and holds one at a time."""


@dataclass(frozen=True, slots=True)
class WeightTransfer:
    """See `weight_transfer` and `weight_dir` in the config; direct: to an engine in this process."""

    kind: Literal["file", "cuda_ipc", "direct"] = "file"
    directory: str = "/dev/shm"


BY_FILE = WeightTransfer()


@dataclass(frozen=True, slots=True)
class Offer:
    """How an engine is told of weights: the order and its arguments."""

    call: str
    arguments: Mapping[str, Any]


@contextmanager
def offered(weights: Sequence[tuple[str, Tensor]], transfer: WeightTransfer) -> Iterator[Offer]:
    """Weights that engines can load inside. Handles are of the very tensors, which must not change meanwhile."""
    if transfer.kind == "cuda_ipc":
        yield Offer("load_ipc", {"handles": ipc_handles(weights)})
        return
    if transfer.kind == "direct":
        yield Offer("load_tensors", {"weights": [(name, tensor.detach()) for name, tensor in weights]})
        return
    with weight_files(weights, transfer.directory) as paths:
        yield Offer("load", {"paths": paths})


@contextmanager
def weight_files(
    weights: Iterable[tuple[str, Tensor]], directory: str, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[list[str]]:
    """Paths of files that hold `weights`; they are gone on leaving.

    Raises:
        OSError: the folder is missing or full.
    """
    place = Path(directory) if Path(directory).is_dir() else None  # no /dev/shm outside Linux
    with tempfile.TemporaryDirectory(prefix="paceline-weights-", dir=place) as folder:
        yield list(_written(weights, Path(folder), bucket_bytes))


def _written(weights: Iterable[tuple[str, Tensor]], folder: Path, bucket_bytes: int) -> Iterator[str]:
    bucket: dict[str, Tensor] = {}
    num_files = num_bytes = 0
    for name, tensor in weights:
        held = tensor.detach().contiguous().cpu()
        bucket[name] = held
        num_bytes += held.numel() * held.element_size()
        if num_bytes >= bucket_bytes:
            yield _save(bucket, folder, num_files)
            bucket, num_bytes, num_files = {}, 0, num_files + 1
    if bucket:
        yield _save(bucket, folder, num_files)


def _save(bucket: dict[str, Tensor], folder: Path, number: int) -> str:
    path = folder / f"{number:05d}.safetensors"
    save_file(bucket, path)
    return str(path)
