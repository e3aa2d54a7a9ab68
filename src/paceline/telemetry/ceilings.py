"""What a machine reaches at best, measured once and kept per user: `paceline doctor --measure`. Torch-free.

Runs copy what is kept for their device into env.json, so that a run's folder can be read anywhere.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from paceline.files import write_whole
from paceline.telemetry.hardware import lookup

RECORD_VERSION = 1
_SIXTEEN_BIT = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of one device (or of one CPU with so many threads) under one version of torch. None is what was not measured.

    TFLOP/s are of large matrix products by dtype; `copy_gbs` counts bytes read and bytes written (10^9 per second);
    `collective_*` are of two ranks on one machine: latency of the smallest all-reduce, and bus bandwidth of a large
    one, 2 (n - 1) / n x bytes / seconds. `is_measured` is false for figures of a data sheet.
    """

    device_name: str
    torch_version: str
    matmul_tflops: Mapping[str, float] = field(default_factory=dict)
    copy_gbs: float | None = None
    host_to_device_gbs: float | None = None
    device_to_host_gbs: float | None = None
    collective_backend: str | None = None
    collective_latency_us: float | None = None
    collective_gbs: float | None = None
    disk_write_gbs: float | None = None
    unix_s: float = 0.0
    is_measured: bool = True

    @property
    def key(self) -> str:
        """What it is kept under."""
        return ceilings_key(self.device_name, self.torch_version)

    def as_dict(self) -> dict[str, Any]:
        """As env.json and the cache hold it."""
        return asdict(self)


def ceilings_key(device_name: str, torch_version: str) -> str:
    """Other devices and other versions reach other speeds."""
    return f"{device_name} | torch {torch_version}"


def ceilings_from(record: Mapping[str, Any] | None) -> Ceilings | None:
    """The inverse of `as_dict`; None for None."""
    return None if record is None else Ceilings(**record)


def cpu_device_name(cpu_model: str, num_threads: int) -> str:
    """A CPU as a device: what it reaches depends on the threads it may use."""
    return f"{cpu_model}, {num_threads} threads"


def cache_file() -> Path:
    """`$PACELINE_CACHE/ceilings.json`, or below `~/.cache/paceline`."""
    configured = os.environ.get("PACELINE_CACHE")
    folder = Path(configured).expanduser() if configured else Path.home() / ".cache" / "paceline"
    return folder / "ceilings.json"


def read_ceilings(device_name: str, torch_version: str) -> Ceilings | None:
    """What was measured for this device and version, None if nothing was (or the file cannot be read)."""
    return ceilings_from(_read_all().get(ceilings_key(device_name, torch_version)))


def store_ceilings(ceilings: Ceilings) -> Path:
    """Keeps what was measured, in place of what was kept for this device and version; returns the file."""
    path = cache_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):  # two machines of one home directory may measure at once
        records = {**_read_all(), ceilings.key: ceilings.as_dict()}
        text = json.dumps({"v": RECORD_VERSION, "ceilings": records}, indent=2)
        write_whole(path, text + "\n")
    return path


def _read_all() -> dict[str, dict[str, Any]]:
    try:
        content = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):  # none yet, or damaged: it is measured again
        return {}
    return dict(content["ceilings"]) if content.get("v") == RECORD_VERSION else {}


def data_sheet_ceilings(device_name: str | None) -> Ceilings | None:
    """The vendor's peaks where the device is known: above what any work reaches."""
    hardware = None if device_name is None else lookup(device_name)
    if hardware is None:
        return None
    peaks = dict.fromkeys(_SIXTEEN_BIT, float(hardware.bf16_tflops))
    return Ceilings(
        hardware.name, "", matmul_tflops=peaks, copy_gbs=hardware.bandwidth_tbs * 1000, is_measured=False
    )
