"""Memory figures: the host's from the system, the device's as peaks between two looks."""

import numpy as np
import pytest
import torch

from paceline.telemetry.device_memory import DeviceMemorySampler
from paceline.telemetry.host_memory import host_rss
from paceline.telemetry.ledger import Ledger, MemorySample
from paceline.telemetry.records import read_ledger

MIB = 2**20


def test_resident_memory_grows_by_what_is_touched():
    before = host_rss()
    block = np.ones(64 * MIB, dtype=np.uint8)
    assert host_rss() - before > 48 * MIB
    assert block.sum() == 64 * MIB


def test_a_cpu_has_no_device_peaks():
    assert DeviceMemorySampler(torch.device("cpu"))() == MemorySample(0, 0, 0)


class Allocator:
    """Stands for a device: what is allocated at its most since the last look."""

    def __init__(self):
        self.peak = 0

    def __call__(self):
        sample, self.peak = MemorySample(self.peak, 2 * self.peak), 0
        return sample


def read_step(tmp_path):
    (rank,) = read_ledger(tmp_path)
    (step,) = rank.steps()
    return step


def test_a_peak_counts_for_the_stage_that_caused_it_also_where_it_is_nested(tmp_path):
    device = Allocator()
    ledger = Ledger(tmp_path / "ledger" / "rank0.jsonl", sample_memory=device)
    with ledger.step(1):
        with ledger.span("rollout"):
            device.peak = 10
            with ledger.span("reward"):
                device.peak = 70
            device.peak = 20
        device.peak = 500  # by no span
        with ledger.span("update_actor"):
            device.peak = 30
    totals = ledger.last_section
    ledger.close()
    step = read_step(tmp_path)
    peaks = {stage: record.peak_allocated for stage, record in step.stages.items()}
    assert peaks == {"rollout": 20, "reward": 70, "update_actor": 30}
    assert (step.peak_allocated, step.peak_reserved) == (500, 1000)
    assert (totals.memory.peak_allocated, totals.memory.peak_reserved) == (500, 1000)


def test_spans_of_one_stage_inside_one_another_do_not_look_at_the_device(tmp_path):
    looks = []
    ledger = Ledger(sample_memory=lambda: looks.append(1) or MemorySample())
    with ledger.span("rollout"):
        before = len(looks)
        for _ in range(100):
            with ledger.span("rollout", "decode"):
                pass
        assert len(looks) == before


def test_host_memory_is_looked_at_once_for_a_span_that_lies_in_no_other(tmp_path):
    looks = []
    ledger = Ledger(tmp_path / "ledger" / "rank0.jsonl", sample_host=lambda: looks.append(1) or 7 * MIB)
    with ledger.step(1), ledger.span("rollout"), ledger.span("reward"), ledger.span("data"):
        pass
    assert ledger.last_section.memory.host_rss == 7 * MIB
    ledger.close()
    step = read_step(tmp_path)
    assert len(looks) == 1
    assert (step.host_rss, step.stages["rollout"].host_rss, step.stages["data"].host_rss) == (
        7 * MIB,
        7 * MIB,
        0,
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_each_look_starts_a_new_peak():
    device = torch.device("cuda")
    held = torch.cuda.memory_allocated(device)  # cuBLAS keeps its workspaces from earlier tests
    sampler = DeviceMemorySampler(device)
    block = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    del block
    assert sampler().peak_allocated >= held + 64 * MIB
    assert sampler().peak_allocated == held


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_ledger_files_a_peak_under_the_stage_that_caused_it(tmp_path):
    device = torch.device("cuda")
    held = torch.cuda.memory_allocated(device)
    ledger = Ledger(tmp_path / "ledger" / "rank0.jsonl", sample_memory=DeviceMemorySampler(device))
    with ledger.span("rollout"):
        block = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
        del block
    with ledger.span("reward"):
        pass
    ledger.close()
    (process,) = read_ledger(tmp_path)[0].processes
    stages = process.sections[0].stages
    assert stages["rollout"].peak_allocated >= held + 64 * MIB
    assert stages["reward"].peak_allocated == held
