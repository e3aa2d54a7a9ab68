"""Peaks of known accelerators. What is not in the table is unknown, and no peak is guessed for it. Torch-free.

Dense BF16 TFLOP/s, memory in GB (10^9 bytes) and its bandwidth in TB/s, per device, from the vendors' data sheets.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Hardware:
    """Peaks of one device."""

    name: str
    bf16_tflops: float
    memory_gb: float
    bandwidth_tbs: float


_TABLE: dict[Hardware, tuple[str, ...]] = {
    Hardware("A100 SXM 80GB", 312, 80, 2.04): ("A100", "A100 SXM", "A100 SXM4 80GB"),
    Hardware("A100 SXM 40GB", 312, 40, 1.56): ("A100 SXM4 40GB",),
    Hardware("A100 PCIe 80GB", 312, 80, 1.94): ("A100 80GB PCIE",),
    Hardware("A100 PCIe 40GB", 312, 40, 1.56): ("A100 PCIE 40GB",),
    Hardware("H100 SXM", 989, 80, 3.35): ("H100", "H100 SXM", "H100 SXM5", "H100 80GB HBM3"),
    Hardware("H100 PCIe", 756, 80, 2.0): ("H100 PCIE",),
    Hardware("H100 NVL", 835, 94, 3.9): ("H100 NVL",),
    Hardware("H200", 989, 141, 4.8): ("H200", "H200 SXM"),
    Hardware("H200 NVL", 835, 141, 4.8): ("H200 NVL",),
    Hardware("B200", 2250, 180, 7.7): ("B200",),
    Hardware("GB200", 2500, 185, 8.0): ("GB200",),
    Hardware("H20", 148, 96, 4.0): ("H20",),
    Hardware("MI300X", 1307, 192, 5.3): ("MI300X", "MI300X OAM"),
    # the 910B's variants (910B1 to 910B4) differ by a fifth, so a variant's name is not taken for the family's
    Hardware("910B", 354, 64, 1.6): ("910B",),
    Hardware("L40S", 362, 48, 0.86): ("L40S",),
    Hardware("RTX 4090", 165, 24, 1.01): ("RTX 4090",),
}
"""Each device with the names it is known by, in upper case and without the vendor's words."""

_VENDOR_WORDS = frozenset({"NVIDIA", "AMD", "INSTINCT", "GEFORCE", "TESLA", "ASCEND", "HUAWEI"})


def lookup(device_name: str) -> Hardware | None:
    """The device that a driver (or a person) calls `device_name`, such as "NVIDIA H100 80GB HBM3".

    The whole name must be known: a "RTX 4090 Laptop GPU" or a slice of an A100 is not the device whose name it
    contains. None for CPUs and everything else that is not in the table.
    """
    words = re.split(r"[^A-Z0-9.]+", device_name.upper().replace("ASCEND", "ASCEND "))
    return _BY_NAME.get(frozenset(word for word in words if word and word not in _VENDOR_WORDS))


def known_peak_tflops(device_name: str | None, dtype: str, stated: float | None) -> float | None:
    """Peak of one device in TFLOP/s that work of `dtype` ("bfloat16") may be compared with; None where none is known.

    `stated` is the recipe's (`telemetry.peak_tflops`) and holds for any dtype. The table's peaks are those of 16-bit
    matrix units: other dtypes have other peaks, which are not guessed. `device_name` is None on a CPU.
    """
    if stated is not None:
        return stated
    if device_name is None or dtype not in _SIXTEEN_BIT:
        return None
    hardware = lookup(device_name)
    return None if hardware is None else hardware.bf16_tflops


_SIXTEEN_BIT = frozenset({"bfloat16", "float16"})

_BY_NAME: dict[frozenset[str], Hardware] = {
    frozenset(name.split()): hardware for hardware, names in _TABLE.items() for name in names
}
