"""A run's folder: what is written where, and who may write into it."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from paceline.config import Config, ConfigError, dump_config
from paceline.engine.recompute import decoder_layers
from paceline.files import write_whole
from paceline.model.flash_kernels import kernel_for
from paceline.model.fused.layers import is_fused
from paceline.model.loading import CausalModel, has_bf16_matrix_units
from paceline.model.packing_probe import ProbeResult
from paceline.telemetry.ceilings import cpu_device_name, read_ceilings
from paceline.telemetry.environment import collect_environment, cpu_model, write_environment
from paceline.telemetry.run_process import PROCESS_FILE, RunProcess, read_process, this_process, write_process

RECORD_VERSION = 1
SUMMARY_FILE = "summary.json"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`path` is `run.dir/run.name`; `resumes` says whether a checkpoint may be continued from."""

    path: Path
    resumes: bool
    is_writer: bool = True
    """Whether this process writes what there is once for all ranks; where not, `write_` methods do nothing."""
    config_text: str = ""
    """config.yaml of this start. That of a run which was there already stays until this one is known to start."""

    @contextmanager
    def process_recorded(self) -> Iterator[None]:
        """process.json: this process writes the run, and how it ends; a killed one leaves it without an end."""
        if not self.is_writer:
            yield
            return
        process = this_process()
        write_process(self.path, process)
        try:
            yield
        except BaseException as error:
            # recorded whatever it is, then raised on: the run's folder must not say that it is starting
            with unwritten_noted(error, PROCESS_FILE):
                write_process(self.path, _ended_by(error, process))
            raise
        write_process(self.path, replace(process, outcome="ended"))

    def write_config(self) -> None:
        """config.yaml of a run that goes on: what it goes on with."""
        if self.is_writer and self.resumes:
            write_whole(self.path / "config.yaml", self.config_text)

    def keep_config(self, step: int, text: str) -> None:
        """config.until_step_{n}.yaml: the settings that the steps up to `step` were made with, now that they change."""
        if self.is_writer:
            write_whole(self.path / f"config.until_step_{step}.yaml", text)

    def write_environment(
        self, model: CausalModel, probe: ProbeResult | None, features: Mapping[str, Any] | None = None
    ) -> None:
        """env.json: versions, hardware, and which back ends were chosen; `features` are added to those."""
        if not self.is_writer:
            return
        device = model.device
        kernel = kernel_for(device)
        extra = {
            "device": device.type,
            "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "num_threads": torch.get_num_threads(),
            "num_ranks": dist.get_world_size() if dist.is_initialized() else 1,
            "dtype": str(model.dtype).removeprefix("torch."),
            "model_type": model.family.model_type,
            "family_tested": model.family.tested,
            "ceilings": _ceilings(device),
            "features": {
                "packed_attention": "pieces" if kernel is None else kernel.name,
                "fused_layers": is_fused(decoder_layers(model.module, model.shape.num_layers)),
                "bf16_matrix_units": device.type == "cuda" or has_bf16_matrix_units(),
                "packing_probe_mean_nats": None if probe is None else probe.mean_difference,
                "packing_probe_max_nats": None if probe is None else probe.max_difference,
                **(features or {}),
            },
        }
        write_environment(self.path, collect_environment(extra))

    def write_summary(self, figures: Mapping[str, Any]) -> None:
        """summary.json: what a person wants to know of the whole run."""
        if not self.is_writer:
            return
        text = json.dumps({"v": RECORD_VERSION, **figures}, indent=2, ensure_ascii=False)
        write_whole(self.path / SUMMARY_FILE, text + "\n")

    def write_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """samples/step{n}.jsonl: every completion of a step with its verdict and credit."""
        if not self.is_writer:
            return
        folder = self.path / "samples"
        folder.mkdir(exist_ok=True)
        text = "".join(json.dumps({"v": RECORD_VERSION, **row}, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"step{step}.jsonl").write_text(text, encoding="utf-8")


@contextmanager
def unwritten_noted(error: BaseException, name: str) -> Iterator[None]:
    """For the record of an error in file `name`: where it cannot be written (a full disk, which may be the error
    itself), a note on the error says so, and the error is what is raised on."""
    try:
        yield
    except OSError as unwritten:
        error.add_note(f"{name} could not say so: {unwritten}")


def _ended_by(error: BaseException, process: RunProcess) -> RunProcess:
    if isinstance(error, ConfigError):
        return replace(process, outcome="refused", message=str(error))
    return replace(process, outcome="failed", message=f"{type(error).__name__}: {error}")


def _ceilings(device: torch.device) -> dict[str, Any] | None:
    """What `paceline doctor --measure` has found for this device and version of torch, if it was run."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = cpu_device_name(cpu_model(), torch.get_num_threads())
    found = read_ceilings(name, torch.__version__)
    return None if found is None else found.as_dict()


def open_run_folder(config: Config) -> RunFolder:
    """Creates the folder with its config.yaml, or reopens it.

    A run that was there keeps its config.yaml until `write_config`: a command refused for its model, say, must not
    change what the records of a finished run say of it.

    Raises:
        ConfigError: the folder holds a run and `run.resume` is "never", or none to resume and it is "must", or another
            process writes into it.
    """
    path = Path(config.run.dir) / config.run.name
    if config.run.resume == "must" and not path.exists():
        raise _nothing_to_resume(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"{path} cannot be made ({error.strerror}); name a folder that may be written"
        raise ConfigError("run.dir", config.run.dir, rule, "runs") from error
    with _one_at_a_time(path):
        folder = _opened(config, path)
        write_process(path, this_process())
    return folder


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Two starts at the same instant: the second looks at the folder when the first has said that it is its own."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: the window is there, and small
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _nothing_to_resume(path: Path) -> ConfigError:
    return ConfigError("run.resume", "must", f"{path} holds no run to resume", "auto")


def _opened(config: Config, path: Path) -> RunFolder:
    before = read_process(path)
    if before is not None and before.is_gone is False and before.pid != os.getpid():
        rule = f"process {before.pid} is writing {path}: stop it, or give this run another name"
        raise ConfigError("run.name", config.run.name, rule, f"{config.run.name}-2")
    never_began = before is not None and before.outcome == "refused" and not (path / SUMMARY_FILE).exists()
    holds_run = (path / "config.yaml").exists() and not never_began
    if holds_run and config.run.resume == "never":
        raise ConfigError("run.name", config.run.name, f"{path} already holds a run", f"{config.run.name}-2")
    if not holds_run and config.run.resume == "must":
        raise _nothing_to_resume(path)
    text = dump_config(config)
    if holds_run:
        return RunFolder(path, resumes=True, config_text=text)
    write_whole(path / "config.yaml", text)
    return RunFolder(path, resumes=False, config_text=text)
