"""Memory figures: the host's from the system, the device's as peaks between two looks."""

import numpy as np
import pytest
import torch

from paceline.telemetry.device_memory import DeviceMemorySampler
from paceline.telemetry.host_memory import host_rss
from paceline.telemetry.ledger import Ledger

MIB = 2**20


def test_resident_memory_grows_by_what_is_touched():
    before = host_rss()
    block = np.ones(64 * MIB, dtype=np.uint8)
    assert host_rss() - before > 48 * MIB
    assert block.sum() == 64 * MIB


def test_a_cpu_has_no_device_peaks_but_host_memory():
    sample = DeviceMemorySampler(torch.device("cpu"))()
    assert (sample.peak_allocated, sample.peak_reserved) == (0, 0)
    assert sample.host_rss > MIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_each_look_starts_a_new_peak():
    device = torch.device("cuda")
    sampler = DeviceMemorySampler(device)
    block = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    del block
    assert sampler().peak_allocated >= 64 * MIB
    assert sampler().peak_allocated < 64 * MIB


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_ledger_files_a_peak_under_the_stage_that_caused_it(tmp_path):
    device = torch.device("cuda")
    ledger = Ledger(sample_memory=DeviceMemorySampler(device))
    with ledger.span("rollout"):
        block = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
        del block
    with ledger.span("reward"):
        pass
    stages = ledger._section.stages
    assert stages["rollout"].memory.peak_allocated >= 64 * MIB > stages["reward"].memory.peak_allocated
