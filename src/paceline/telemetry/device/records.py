"""device/rank{r}.jsonl: samples of a rank's device and of the host, as written and as read. Torch-free."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline.telemetry.jsonl import read_lines

RECORD_VERSION = 1
DEVICE_FOLDER = "device"


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """What a driver says of one device; None is what it does not say. Shares are from 0 to 1.

    `utilization` is the share of time in which any kernel ran (NVIDIA) or the cores worked (Ascend: AICore). SM
    activity is the mean share of multiprocessors with work, tensor and DRAM activity the shares of their peak rates.
    """

    utilization: float | None = None
    sm_activity: float | None = None
    tensor_activity: float | None = None
    dram_activity: float | None = None
    power_w: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    temperature_c: float | None = None


@dataclass(frozen=True, slots=True)
class HostFigures:
    """CPU in cores (1.0 is one core all the time since the sample before), memory in bytes."""

    process_cpu: float
    children_cpu: float
    host_cpu: float
    host_num_cores: int
    process_rss: int
    children_rss: int
    host_memory_used: int
    num_children: int


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One look. `device` is None where there is no device, or the look at it failed."""

    unix_s: float
    host: HostFigures | None
    device: DeviceFigures | None


@dataclass(slots=True)
class RankDevice:
    """A rank's file: every process of the rank that sampled, one after another.

    `source` is what the device was asked through (`nvml`, `npu-smi`; empty: none, for `reason`). `num_failed` counts
    samples of which a part failed, `seconds` what sampling took.
    """

    rank: int
    source: str = ""
    reason: str = ""
    samples: list[DeviceSample] = field(default_factory=list)
    num_failed: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    num_torn_lines: int = 0

    def between(self, start_unix_s: float, end_unix_s: float) -> list[DeviceSample]:
        """Samples taken in a stretch of time."""
        return [one for one in self.samples if start_unix_s <= one.unix_s < end_unix_s]


def device_path(run_dir: Path, rank: int) -> Path:
    """Where a rank's samples are."""
    return run_dir / DEVICE_FOLDER / f"rank{rank}.jsonl"


def start_line(unix_s: float, rank: int, source: str, reason: str, every_s: float) -> dict[str, Any]:
    """A process begins to sample."""
    head = {"v": RECORD_VERSION, "kind": "start", "unix_s": unix_s, "rank": rank}
    return {**head, "source": source, "reason": reason, "every_s": every_s}


def sample_line(sample: DeviceSample) -> dict[str, Any]:
    """A sample as it is written; what is not known is left out."""
    line: dict[str, Any] = {"v": RECORD_VERSION, "kind": "sample", "unix_s": sample.unix_s}
    for name, part in (("device", sample.device), ("host", sample.host)):
        if part is not None:
            line[name] = {key: value for key, value in asdict(part).items() if value is not None}
    return line


def end_line(unix_s: float, num_failed: int, failures: Mapping[str, int], seconds: float) -> dict[str, Any]:
    """A process has done sampling."""
    head = {"v": RECORD_VERSION, "kind": "end", "unix_s": unix_s}
    return {**head, "num_failed": num_failed, "failures": dict(failures), "seconds": seconds}


def read_device_samples(run_dir: Path) -> tuple[RankDevice, ...]:
    """Every rank's samples, by rank. Empty when none were taken.

    Raises:
        ValueError: a record of a version or kind that is not known here.
    """
    folder = run_dir / DEVICE_FOLDER
    files = sorted(folder.glob("rank*.jsonl"), key=lambda path: int(path.stem.removeprefix("rank")))
    return tuple(_read_rank(path) for path in files)


def _read_rank(path: Path) -> RankDevice:
    rank = RankDevice(int(path.stem.removeprefix("rank")))
    for record in read_lines(path):
        if record is None:
            rank.num_torn_lines += 1
            continue
        if record["v"] != RECORD_VERSION:
            raise ValueError(
                f"{path}: a record of version {record['v']}; this paceline reads version {RECORD_VERSION}"
            )
        match record["kind"]:
            case "start":
                rank.source, rank.reason = record["source"], record["reason"]
            case "sample":
                rank.samples.append(_sample(record))
            case "end":
                rank.num_failed += record["num_failed"]
                rank.seconds += record["seconds"]
                for text, count in record["failures"].items():
                    rank.failures[text] = rank.failures.get(text, 0) + count
            case other:
                raise ValueError(f"{path}: a record of kind {other!r}; this paceline knows no such kind")
    return rank


def _sample(record: Mapping[str, Any]) -> DeviceSample:
    device, host = record.get("device"), record.get("host")
    return DeviceSample(
        record["unix_s"],
        None if host is None else HostFigures(**host),
        None if device is None else DeviceFigures(**device),
    )


def mean_figures(samples: Iterable[DeviceSample]) -> dict[str, float]:
    """Mean of every figure over the samples that have it: device figures under their names, the host's too."""
    sums: dict[str, list[float]] = {}
    for name, value in _figures(samples):
        sums.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in sums.items()}


def _figures(samples: Iterable[DeviceSample]) -> Iterator[tuple[str, float]]:
    for sample in samples:
        for part in (sample.device, sample.host):
            if part is not None:
                for one in fields(part):
                    value = getattr(part, one.name)
                    if value is not None:
                        yield one.name, float(value)
