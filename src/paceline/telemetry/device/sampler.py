"""A thread that looks at the device and the host every so often. It never breaks a run and steps back when slow."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from paceline.telemetry.device.host import HostSource
from paceline.telemetry.device.nvml import NoSourceError
from paceline.telemetry.device.records import (
    DeviceFigures,
    DeviceSample,
    HostFigures,
    device_path,
    end_line,
    sample_line,
    start_line,
)
from paceline.telemetry.jsonl import open_append

T = TypeVar("T")

_MAX_SHARE = 0.01
"""Of a thread's time that sampling may take; a slower look is taken less often."""
_MIN_LAST_S = 0.05
_JOIN_TIMEOUT_S = 5.0


class DeviceSource(Protocol):
    """Gives the figures of one device."""

    name: str

    def __call__(self) -> DeviceFigures: ...

    def close(self) -> None: ...


class DeviceSampler:
    """Of one rank: appends to device/rank{r}.jsonl every `every_s` seconds until it is closed.

    `open_source` finds the device's source in the sampler's thread; where it raises `NoSourceError` the host alone is
    sampled, and the file says why. A look that fails, whatever it raises, is counted and skipped.
    """

    def __init__(
        self,
        run_dir: Path,
        rank: int,
        every_s: float,
        open_source: Callable[[], DeviceSource],
        open_host: Callable[[], Callable[[], HostFigures]] = HostSource,
    ) -> None:
        self._path, self._rank, self._every_s = device_path(run_dir, rank), rank, every_s
        self._open_source, self._open_host = open_source, open_host
        self._stop = threading.Event()
        self._num_failed = self._num_told = 0
        self._failures: dict[str, int] = {}
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="device-sampler", daemon=True)
        self._thread.start()

    def take_num_failed(self) -> int:
        """Looks that failed since this was last asked."""
        failed = self._num_failed
        new, self._num_told = failed - self._num_told, failed
        return new

    def close(self) -> None:
        """Takes a last sample and ends the thread; a look that hangs is left behind."""
        self._stop.set()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        try:
            with open_append(self._path) as file:

                def write(line: dict[str, object]) -> None:
                    file.write(json.dumps(line) + "\n")
                    file.flush()

                self._sample_until_stopped(write)
        except Exception as error:  # a full disk ends the samples, not the run; `take_num_failed` tells
            self._count(error)

    def _sample_until_stopped(self, write: Callable[[dict[str, object]], None]) -> None:
        source, reason = self._find_source()
        host = self._guarded(self._open_host)
        write(start_line(time.time(), self._rank, source.name if source else "", reason, self._every_s))
        wait_s, last = self._every_s, time.perf_counter()
        while not self._stop.wait(wait_s) or time.perf_counter() - last > _MIN_LAST_S:
            last = time.perf_counter()
            figures = None if host is None else self._guarded(host)
            device = None if source is None else self._guarded(source)
            write(sample_line(DeviceSample(time.time(), figures, device)))
            took_s = time.perf_counter() - last
            self._seconds += took_s
            wait_s = max(self._every_s, took_s / _MAX_SHARE)
            if self._stop.is_set():
                break
        write(end_line(time.time(), self._num_failed, self._failures, self._seconds))
        if source is not None:
            self._guarded(source.close)

    def _find_source(self) -> tuple[DeviceSource | None, str]:
        try:
            return self._open_source(), ""
        except NoSourceError as error:
            return None, str(error)

    def _guarded(self, look: Callable[[], T]) -> T | None:
        try:
            return look()
        except Exception as error:  # whatever a driver raises, the run goes on; counted and told
            self._count(error)
            return None

    def _count(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"[:200]
        self._failures[text] = self._failures.get(text, 0) + 1
        self._num_failed += 1
