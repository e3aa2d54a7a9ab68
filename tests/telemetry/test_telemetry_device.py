"""Samples of device and host: they are read back, and sampling neither breaks a run nor hides what failed."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.telemetry.device.host import HostSource
from paceline.telemetry.device.npu_smi import parse_npu_smi
from paceline.telemetry.device.nvml import NoSourceError, NvmlSource
from paceline.telemetry.device.records import (
    DeviceFigures,
    DeviceSample,
    RankDevice,
    device_path,
    mean_figures,
    read_device_samples,
    sample_line,
)
from paceline.telemetry.device.sampler import DeviceSampler
from paceline.telemetry.device.stages import figures_by_stage
from paceline.telemetry.records import LedgerProcess, RankLedger, SpanRecord


class Source:
    """A device that answers what it is told to."""

    name = "nvml"

    def __init__(self, answers: list[Any]) -> None:
        self.answers, self.is_closed = answers, False

    def __call__(self) -> DeviceFigures:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return DeviceFigures(utilization=answer)

    def close(self) -> None:
        self.is_closed = True


def sample_until(run_dir: Path, source: Any, enough: int, every_s: float = 0.01) -> DeviceSampler:
    """A sampler that has written `enough` samples, closed."""

    def open_source() -> Any:
        if isinstance(source, Exception):
            raise source
        return source

    sampler = DeviceSampler(run_dir, 3, every_s, open_source)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ranks = read_device_samples(run_dir)
        if ranks and len(ranks[0].samples) >= enough:
            break
        time.sleep(0.02)
    sampler.close()
    return sampler


def test_samples_are_read_back(tmp_path: Path) -> None:
    source = Source([0.25, 0.75])
    began = time.time()
    sampler = sample_until(tmp_path, source, enough=3)
    (rank,) = read_device_samples(tmp_path)
    assert (rank.rank, rank.source, rank.num_failed, rank.num_torn_lines) == (3, "nvml", 0, 0)
    assert [one.device.utilization for one in rank.samples[:3] if one.device] == [0.25, 0.75, 0.75]
    assert all(one.host is not None and one.host.process_rss > 1e6 for one in rank.samples)
    assert rank.between(began, time.time()) == rank.samples and rank.seconds > 0
    assert source.is_closed and sampler.take_num_failed() == 0
    assert 0.25 < mean_figures(rank.samples)["utilization"] <= 0.75


def test_a_look_that_fails_is_counted_and_the_next_is_taken(tmp_path: Path) -> None:
    source = Source([0.5, RuntimeError("GPU is lost"), RuntimeError("GPU is lost"), 0.5])
    sampler = sample_until(tmp_path, source, enough=4)
    (rank,) = read_device_samples(tmp_path)
    assert [one.device is None for one in rank.samples[:4]] == [False, True, True, False]
    assert rank.failures == {"RuntimeError: GPU is lost": 2}
    assert (sampler.take_num_failed(), sampler.take_num_failed()) == (2, 0)


def test_a_run_without_a_device_samples_the_host_and_says_why(tmp_path: Path) -> None:
    sample_until(tmp_path, NoSourceError("the run is on the CPU"), enough=1)
    (rank,) = read_device_samples(tmp_path)
    assert (rank.source, rank.reason, rank.num_failed) == ("", "the run is on the CPU", 0)
    assert rank.samples[0].device is None and rank.samples[0].host is not None


def test_a_folder_that_cannot_be_written_costs_the_samples_only(tmp_path: Path) -> None:
    device_path(tmp_path, 3).parent.write_text("a file where the folder would be")
    sampler = DeviceSampler(tmp_path, 3, 0.01, lambda: Source([0.5]))
    sampler.close()
    assert sampler.take_num_failed() == 1


def test_a_slow_look_is_taken_less_often(tmp_path: Path) -> None:
    class Slow(Source):
        def __call__(self) -> DeviceFigures:
            time.sleep(0.05)
            return super().__call__()

    sampler = DeviceSampler(tmp_path, 0, 0.001, lambda: Slow([0.5]))
    time.sleep(1.0)  # at 1 % of the time one look of 50 ms is due every 5 s
    sampler.close()
    (rank,) = read_device_samples(tmp_path)
    assert 1 <= len(rank.samples) <= 2


def test_a_look_that_hangs_does_not_keep_the_run_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = threading.Event()
    monkeypatch.setattr("paceline.telemetry.device.sampler._JOIN_TIMEOUT_S", 0.2)

    class Hangs(Source):
        def __call__(self) -> DeviceFigures:
            hang.wait()
            return super().__call__()

    sampler = DeviceSampler(tmp_path, 0, 0.01, lambda: Hangs([0.5]))
    time.sleep(0.2)
    began = time.monotonic()
    sampler.close()
    assert time.monotonic() - began < 30
    hang.set()


def test_torn_lines_are_counted(tmp_path: Path) -> None:
    path = device_path(tmp_path, 0)
    path.parent.mkdir()
    line = json.dumps(sample_line(DeviceSample(1.0, None, DeviceFigures(power_w=300.0))))
    path.write_text(f"{line}\n{line[:20]}\n{line}\n")
    (rank,) = read_device_samples(tmp_path)
    assert (len(rank.samples), rank.num_torn_lines) == (2, 1)


def test_cpu_of_a_child_counts_apart_from_the_process() -> None:
    source = HostSource()
    loop = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass\ninput()"
    child = subprocess.Popen([sys.executable, "-c", loop], stdin=subprocess.PIPE)
    try:
        used_s, deadline = 0.0, time.monotonic() + 60
        at = time.perf_counter()
        while used_s < 0.5 and time.monotonic() < deadline:
            time.sleep(0.2)
            figures = source()
            used_s += figures.children_cpu * (time.perf_counter() - at)
            at = time.perf_counter()
            assert figures.num_children >= 1 and figures.children_rss > 0
            assert figures.process_cpu < 0.9
        assert used_s >= 0.4
    finally:
        child.kill()
        child.wait()


class Nvml(SimpleNamespace):
    """The part of the binding that is used, for a device that has GPM counters and no power reading."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class NVMLError_NoPermission(NVMLError):
        pass

    NVML_SUCCESS, NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 0, 1, 2, 0
    NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_ANY_TENSOR_UTIL, NVML_GPM_METRIC_DRAM_BW_UTIL = 2, 5, 10
    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self) -> None:
        self.looks, self.is_shut, self.pairs = 0, False, []

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None:
        self.is_shut = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(used=3, total=8)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(gpu=40)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        raise self.NVMLError_NotSupported

    def nvmlDeviceGetClockInfo(self, handle: str, which: int) -> int:
        return 1000 * which

    def nvmlDeviceGetTemperature(self, handle: str, which: int) -> int:
        return 60

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=1)

    def nvmlGpmSampleAlloc(self) -> dict[str, int]:
        return {"taken": 0}

    def nvmlGpmSampleGet(self, handle: str, sample: dict[str, int]) -> None:
        self.looks += 1
        sample["taken"] = self.looks

    def nvmlGpmSampleFree(self, sample: dict[str, int]) -> None: ...

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        metrics = [SimpleNamespace(metricId=0, value=0.0, nvmlReturn=1) for _ in range(8)]
        return SimpleNamespace(version=0, numMetrics=0, sample1=None, sample2=None, metrics=metrics)

    def nvmlGpmMetricsGet(self, query: SimpleNamespace) -> None:
        self.pairs.append((query.sample1["taken"], query.sample2["taken"]))
        for metric in query.metrics[: query.numMetrics]:
            metric.value = {2: 80.0, 5: 30.0, 10: 55.0}[metric.metricId]
            metric.nvmlReturn = 0


def test_nvml_gives_shares_and_leaves_out_what_the_device_does_not_say() -> None:
    nvml = Nvml()
    source = NvmlSource("GPU-1", nvml)
    assert (
        source()
        == source()
        == DeviceFigures(
            utilization=0.4,
            sm_activity=0.8,
            tensor_activity=0.3,
            dram_activity=0.55,
            power_w=None,
            sm_clock_mhz=1000,
            memory_clock_mhz=2000,
            memory_used=3,
            memory_total=8,
            temperature_c=60,
        )
    )
    assert nvml.pairs == [(1, 2), (2, 3)]  # each look against the one before it
    source.close()
    assert nvml.is_shut


def test_a_device_that_nvml_does_not_find_is_no_source() -> None:
    with pytest.raises(NoSourceError, match="Not Found"):
        NvmlSource("GPU-2", Nvml())
    with pytest.raises(NoSourceError, match=r"paceline\[nvidia\]"):
        NvmlSource("GPU-1", None)


NPU_ONE_CHIP = """
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc1                 Version: 24.1.rc1                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B2C              | OK            | 86.8        35                0    / 0             |
| 0                         | 0000:66:00.0  | 0           0    / 0          59356/ 65536         |
+===========================+===============+====================================================+
| 5     910B2C              | Warning       | 103.1       37                0    / 0             |
| 0                         | 0000:19:00.0  | 42          0    / 0          3351 / 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 0       0                 | 1712733       | python                   | 48954                   |
+===========================+===============+====================================================+
"""

NPU_TWO_CHIPS = """
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     Ascend910           | OK            | 178.5       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 7           0    / 0          3416 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -           36                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          3195 / 65536         |
+===========================+===============+====================================================+
"""


def test_npu_smi_of_cards_with_one_chip_is_read() -> None:
    first, second = parse_npu_smi(NPU_ONE_CHIP)
    assert (first.card, first.physical_id, first.name, first.health) == (0, 0, "910B2C", "OK")
    assert first.figures == DeviceFigures(
        utilization=0.0, power_w=86.8, temperature_c=35, memory_used=59356 * 2**20, memory_total=65536 * 2**20
    )
    assert (second.card, second.chip, second.physical_id, second.health) == (5, 0, 1, "Warning")
    assert second.figures.utilization == 0.42


def test_npu_smi_of_cards_with_two_chips_is_read() -> None:
    first, second = parse_npu_smi(NPU_TWO_CHIPS)
    assert [(one.card, one.chip, one.physical_id) for one in (first, second)] == [(0, 0, 0), (0, 1, 1)]
    assert (first.figures.power_w, second.figures.power_w) == (178.5, None)
    assert second.figures.memory_used == 3195 * 2**20


def test_text_that_is_no_table_holds_no_chips() -> None:
    assert parse_npu_smi("dcmi module initialize failed. ret is -8005\n") == ()


def test_samples_belong_to_the_stage_their_rank_was_in() -> None:
    spans = [
        SpanRecord(1, "rollout", "", 0, 0.0, 4.0, 3.0),
        SpanRecord(1, "reward", "judge", 1, 1.0, 2.0, 1.0),
        SpanRecord(1, "update_actor", "", 0, 4.5, 6.0, 1.5),
    ]
    ledger = RankLedger(0, (LedgerProcess(1000.0, spans=spans),), 0)
    samples = [
        DeviceSample(1000.0 + at, None, DeviceFigures(utilization=busy))
        for at, busy in ((-1.0, 0.1), (0.5, 0.4), (1.5, 0.6), (4.2, 0.2), (5.0, 1.0), (7.0, 0.1))
    ]
    assert figures_by_stage(ledger, RankDevice(0, samples=samples)) == {
        "rollout": {"num_samples": 2, "utilization": pytest.approx(0.5)},
        "update_actor": {"num_samples": 1, "utilization": 1.0},
    }
