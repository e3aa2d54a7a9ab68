"""Figures of Ascend devices from the table that `npu-smi info` prints. Torch-free; unverified on the hardware.

Two lines a chip: the first starts with the card's number and name, the second with the chip's. Layouts of versions 23
to 26 are read: with and without `Phy-ID`, used memory with and without a space before the slash, `-` for what a second
chip of a card does not say of its own.
"""

import re
import shutil
import subprocess
from dataclasses import dataclass

from paceline.telemetry.device.nvml import NoSourceError
from paceline.telemetry.device.records import DeviceFigures

_TIMEOUT_S = 10.0
_MIB = 2**20
_NUMBER = r"(-?\d+(?:\.\d+)?|-|NA)"
_CARD = re.compile(rf"^\|\s*(\d+)\s+(\S+)\s*\|\s*(\S+)\s*\|\s*{_NUMBER}\s+{_NUMBER}\s+\d+\s*/\s*\d+\s*\|")
_CHIP = re.compile(
    rf"^\|\s*(\d+)(?:\s+(\d+))?\s*\|\s*([0-9A-Fa-f]+:[0-9A-Fa-f.:]+|NA)\s*\|\s*{_NUMBER}\s+"
    r"(\d+)\s*/\s*(\d+)(?:\s+(\d+)\s*/\s*(\d+))?\s*\|"
)


@dataclass(frozen=True, slots=True)
class NpuChip:
    """One chip of the table. `physical_id` counts chips over all cards where the table gives it, else in its order."""

    card: int
    chip: int
    physical_id: int
    name: str
    health: str
    figures: DeviceFigures


def parse_npu_smi(text: str) -> tuple[NpuChip, ...]:
    """Chips of the table, in its order; lines of other tables (processes) are passed over."""
    chips: list[NpuChip] = []
    card: re.Match[str] | None = None
    for line in text.splitlines():
        line = line.strip()
        if found := _CARD.match(line):
            card = found
        elif card is not None and (found := _CHIP.match(line)):
            chips.append(_chip(card, found, len(chips)))
            card = None
    return tuple(chips)


def _chip(card: re.Match[str], chip: re.Match[str], index: int) -> NpuChip:
    physical = chip.group(2)
    # devices with their own memory say HBM in the last column; older ones share the memory column
    used, total = (chip.group(7), chip.group(8)) if chip.group(7) else (chip.group(5), chip.group(6))
    busy = _number(chip.group(4))
    figures = DeviceFigures(
        utilization=None if busy is None else busy / 100,
        power_w=_number(card.group(4)),
        temperature_c=_number(card.group(5)),
        memory_used=int(used) * _MIB,
        memory_total=int(total) * _MIB,
    )
    return NpuChip(
        card=int(card.group(1)),
        chip=int(chip.group(1)),
        physical_id=index if physical is None else int(physical),
        name=card.group(2),
        health=card.group(3),
        figures=figures,
    )


def _number(text: str) -> float | None:
    return None if text in ("-", "NA") else float(text)


class NpuSmiSource:
    """Called, runs `npu-smi info` and gives the figures of one chip.

    Raises:
        NoSourceError: the command is not there.
    """

    name = "npu-smi"

    def __init__(self, physical_id: int) -> None:
        command = shutil.which("npu-smi")
        if command is None:
            raise NoSourceError("npu-smi is not on the path")
        self._command, self._physical_id = command, physical_id

    def __call__(self) -> DeviceFigures:
        """One look, which takes a second or so: the sampler asks less often then."""
        done = subprocess.run(
            [self._command, "info"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        found = {chip.physical_id: chip.figures for chip in parse_npu_smi(done.stdout)}
        if self._physical_id not in found:
            raise RuntimeError(f"npu-smi shows chips {sorted(found)}, not {self._physical_id}")
        return found[self._physical_id]

    def close(self) -> None:
        """Nothing is held."""
