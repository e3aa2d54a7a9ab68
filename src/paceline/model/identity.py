"""Which weights a model's name stands for, wherever its folder lies."""

import hashlib
from pathlib import Path

_PROBES, _PROBE_BYTES = 64, 2**16
_WEIGHTS = (".safetensors", ".bin")


def weights_identity(path: str, revision: str | None = None) -> str:
    """A short name of a model's weights: the same where the folder was moved or copied, another where they were trained
    on.

    Of a local folder, BLAKE2b over its config and, for every weights file, the size and 64 pieces of 64 KiB spread over
    it: read in milliseconds, and training changes all of a matrix. Of a model on the Hub, its id and revision.
    """
    folder = Path(path)
    if not folder.is_dir():
        return f"{path}@{revision}"
    digest = hashlib.blake2b(digest_size=16)
    config = folder / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for file in sorted(file for file in folder.iterdir() if file.suffix in _WEIGHTS):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for probe in range(_PROBES):
                opened.seek(probe * max(0, size - _PROBE_BYTES) // (_PROBES - 1))
                digest.update(opened.read(_PROBE_BYTES))
    return digest.hexdigest()
