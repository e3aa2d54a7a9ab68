"""Supervised fine-tuning: draw rows, update on their assistant tokens, measure on held-out rows, repeat."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from paceline.config import Config
from paceline.schedules.place import open_display, placed
from paceline.schedules.run_folder import SUMMARY_FILE, unwritten_noted
from paceline.schedules.saving import export_run, resume
from paceline.schedules.sft_recorder import SftRecorder
from paceline.schedules.sft_setup import SftRun, open_sft_run, sft_sample
from paceline.schedules.training import NothingTrainedError, RunResult


def train_supervised(run: SftRun, recorder: SftRecorder) -> None:
    """Trains until the epochs (or `sft.max_steps`) are done, or a request to stop is heard."""
    while run.state.step < run.num_steps and not run.stop_requested():
        step = run.state.step + 1
        with run.instruments.step(step):
            recorder.begin(step)
            with run.ledger.span("data", cause="data"):
                rows = run.loader.next_batch(at_most=run.num_rows_planned - run.loader.num_consumed)
            recorder.rows(rows)
            run.trainer.update([sft_sample(row) for row in rows], recorder.metrics)
            run.loader.mark_consumed(row.prompt_id for row in rows)
            run.state.step = run.weight_version = step
            recorder.evaluate_if_due(step)
            recorder.save_if_due(step)
        recorder.end(step)
    recorder.save_if_interrupted()


def run_sft(config: Config, console: Console | None = None) -> RunResult:
    """Trains to the end, or to the next boundary after a request to stop.

    Raises:
        ConfigError: refused before training starts.
        NothingTrainedError: no update was applied in the whole run.
    """
    title = f"{config.run.name} · sft · {Path(config.model.path).name}"
    with (
        placed(config) as place,
        open_display(title, config, place, console, 0, main_figure="loss") as display,
    ):
        display.note(f"{title} · {config.task.name or config.task.path}")
        with open_sft_run(config, display, place) as run:
            resumed = resume(run)
            if resumed:
                run.plan_the_rest()
            display.plan(run.num_steps)
            recorder = SftRecorder(run)
            if resumed:
                recorder.restore_lost_record()
            try:
                summary = _train(run, recorder)
            except BaseException as error:
                # recorded whatever it is, then raised on: a summary must not say "running" of a dead process
                with unwritten_noted(error, SUMMARY_FILE):
                    recorder.summary("failed", f"{type(error).__name__}: {error}")
                raise
    return RunResult(run.folder.path, summary)


def _train(run: SftRun, recorder: SftRecorder) -> Mapping[str, Any]:
    recorder.summary("running")
    recorder.evaluate_before()
    train_supervised(run, recorder)
    with run.ledger.span("checkpoint", "finish writing", cause="queue"):
        run.store.wait()
        if run.config.checkpoint.export_hf:
            export_run(run)
    if run.trainer.optimizer.state()["num_applied"] == 0 and not run.stop_requested():
        raise NothingTrainedError(
            f"{run.state.step} steps without a single optimiser update; see updates/* in metrics.jsonl"
        )
    return recorder.summary("completed" if run.state.step >= run.num_steps else "stopped")
