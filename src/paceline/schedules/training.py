"""From a config to a finished run, whichever the schedule."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.config import Config, require_command
from paceline.schedules.place import open_display, placed
from paceline.schedules.recorder import Recorder
from paceline.schedules.run_folder import SUMMARY_FILE, unwritten_noted
from paceline.schedules.saving import export_run, resume
from paceline.schedules.setup import Run, open_run
from paceline.schedules.sync import train_synchronously
from paceline.sync import CopySync


class NothingTrainedError(RuntimeError):
    """The run ended without a single optimiser update; calling that completed would hide it."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished (or asked-to-stop) run: its folder and what summary.json says."""

    run_dir: Path
    summary: Mapping[str, Any]


def run_training(config: Config, console: Console | None = None) -> RunResult:
    """Trains to the end, or to the next boundary after a request to stop.

    Raises:
        ConfigError: refused before training starts.
        NothingTrainedError: no update was applied in the whole run.
    """
    require_command(config, "train")
    title = f"{config.run.name} · {config.algorithm.name} · {Path(config.model.path).name}"
    with placed(config) as place, open_display(title, config, place, console) as display:
        display.note(f"{title} · {config.task.name or config.task.path}")
        with open_run(config, display, place) as run:
            resumed = resume(run)
            recorder = Recorder(run)
            if resumed:
                recorder.restore_lost_record()
            if isinstance(run.sync, CopySync):  # from here on the engine holds the trainer's weights
                run.sync.publish(run.weight_version)
            display.note(f"  old log-probs: {run.old_logprob.source} ({run.old_logprob.reason})")
            try:
                summary = _train(run, recorder)
            except BaseException as error:
                # recorded whatever it is, then raised on: a summary must not say "running" of a dead process
                with unwritten_noted(error, SUMMARY_FILE):
                    recorder.summary("failed", f"{type(error).__name__}: {error}")
                raise
    return RunResult(run.folder.path, summary)


def _train(run: Run, recorder: Recorder) -> Mapping[str, Any]:
    recorder.summary("running")
    recorder.evaluate_before()
    train_synchronously(run, recorder)
    with run.ledger.span("checkpoint", "finish writing", cause="queue"):
        run.store.wait()
        if run.config.checkpoint.export_hf:
            export_run(run)
    if run.trainer.optimizer.state()["num_applied"] == 0 and not run.stop_requested():
        raise NothingTrainedError(
            f"{run.state.step} steps without a single optimiser update: every update was skipped or had no token to "
            "train on; see updates/* in metrics.jsonl"
        )
    done = run.state.step >= run.config.run.num_steps
    return recorder.summary("completed" if done else "stopped")
