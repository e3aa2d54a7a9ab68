"""Peaks are known by a device's whole name, or not at all."""

import pytest

from paceline.telemetry.hardware import known_peak_tflops, lookup


@pytest.mark.parametrize(
    "reported,name,tflops",
    [
        ("NVIDIA H200", "H200", 989),
        ("NVIDIA H100 80GB HBM3", "H100 SXM", 989),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB", 312),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB", 312),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB", 312),
        ("NVIDIA B200", "B200", 2250),
        ("NVIDIA GB200", "GB200", 2500),
        ("NVIDIA H20", "H20", 148),
        ("NVIDIA L40S", "L40S", 362),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 165),
        ("AMD Instinct MI300X OAM", "MI300X", 1307),
        ("h200", "H200", 989),
    ],
)
def test_a_device_is_known_by_the_name_its_driver_reports(reported, name, tflops):
    hardware = lookup(reported)
    assert hardware is not None
    assert (hardware.name, hardware.bf16_tflops) == (name, tflops)


@pytest.mark.parametrize(
    "reported",
    [
        "",
        "cpu",
        "Intel(R) Xeon(R) Platinum 8480+",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H20-3e",
        "NVIDIA L40",
        "NVIDIA GH200 480GB",
        "NVIDIA B2000",
        "Ascend910B3",
        "Some Future GPU",
    ],
)
def test_a_device_that_only_resembles_a_known_one_is_unknown(reported):
    assert lookup(reported) is None


def test_memory_and_bandwidth_come_with_the_device():
    h200 = lookup("NVIDIA H200")
    assert h200 is not None
    assert (h200.memory_gb, h200.bandwidth_tbs) == (141, 4.8)


def test_only_sixteen_bit_work_is_compared_with_the_sixteen_bit_peak():
    assert known_peak_tflops("NVIDIA H200", "bfloat16", None) == 989
    assert known_peak_tflops("NVIDIA H200", "float16", None) == 989
    assert known_peak_tflops("NVIDIA H200", "float32", None) is None


@pytest.mark.parametrize("name", ["NVIDIA H200", "Some Future GPU", None])
def test_a_stated_peak_holds_for_any_device_and_dtype(name):
    assert known_peak_tflops(name, "float32", 60.0) == 60.0


@pytest.mark.parametrize("name", ["Some Future GPU", None])
def test_no_peak_is_guessed_for_an_unknown_device_or_a_cpu(name):
    assert known_peak_tflops(name, "bfloat16", None) is None
