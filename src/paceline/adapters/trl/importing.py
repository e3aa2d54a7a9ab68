"""TRL's trainer state, event files and console output as an imported run.

TRL times a step as a whole (`step_time`: generation, forward and backward, the optimiser not) and no stage in it, so
all of it is unaccounted; an imported trace says more.
"""

import ast
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline.adapters.run.imported import ImportedRun, ImportedStep
from paceline.adapters.run.logs import EVENT_FILES, Log, finite, read_tensorboard
from paceline.config.errors import ConfigError

STATE_FILE = "trainer_state.json"

METRICS: dict[str, str] = {
    "loss": "loss/total",
    "grad_norm": "grad_norm",
    "learning_rate": "lr",
    "entropy": "entropy",
    "kl": "kl/reference",
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "clip_ratio/region_mean": "clip_fraction",
    "completions/mean_length": "response_length/mean",
    "completions/min_length": "response_length/min",
    "completions/max_length": "response_length/max",
    "completions/clipped_ratio": "truncated_fraction",
    "sampling/sampling_logp_difference/mean": "rollout/logprob_difference_mean",
    "sampling/sampling_logp_difference/max": "rollout/logprob_difference_max",
    "eval_reward": "eval/mean_score",
}
"""TRL's name to ours where both mean the same."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def import_trl(path: Path, name: str | None = None) -> ImportedRun:
    """Reads a run of TRL at `path`: a trainer_state.json, an output folder (its newest checkpoint's state, and event
    files for the times of steps), or a file with the trainer's console output.

    Raises:
        ConfigError: nothing there is a log of TRL's.
    """
    log, sources, notes = _read(path)
    steps = _steps(log)
    if not any(step.foreign for step in steps):
        rule = (
            f"holds no log of TRL's: no {STATE_FILE} with a history, no event files, no printed dictionaries"
        )
        raise ConfigError("PATH", str(path), rule)
    run_name = name or (path.parent if path.is_file() else path).resolve().name
    run = ImportedRun("trl", run_name, steps, sources=sources)
    run.end_unix_s = max(Path(place).stat().st_mtime for place in sources)
    run.notes = [*notes, *_notes(log, steps)]
    return run


def _read(path: Path) -> tuple[Log, dict[str, str], list[str]]:
    if not path.exists():
        raise ConfigError("PATH", str(path), "there is no such file or folder")
    if path.is_file() and path.name.endswith(".json"):
        return _read_state(path), {str(path): "trainer state"}, []
    if path.is_file() and not path.name.startswith(EVENT_FILES):
        note = "The trainer prints no step numbers: lines are counted from 1, as with logging_steps=1."
        return _read_console(path), {str(path): "console"}, [note]
    return _read_folder(path if path.is_dir() else path.parent)


def _read_folder(folder: Path) -> tuple[Log, dict[str, str], list[str]]:
    log, sources = Log(), {}
    states = [(state, _read_state(state)) for state in sorted(folder.rglob(STATE_FILE))]
    if states:
        state, log = max(states, key=lambda pair: max(pair[1].metrics, default=0))  # each holds all before it
        sources[str(state)] = "trainer state"
    for place in sorted({file.parent for file in folder.rglob(f"{EVENT_FILES}*")}):
        events = read_tensorboard(place)
        sources[str(place)] = "tensorboard"
        log.unix_s |= events.unix_s
        for step, metrics in events.metrics.items():
            named = {_without_prefix(tag): value for tag, value in metrics.items()}
            log.metrics[step] = named | log.metrics.get(step, {})
    return log, sources, []


def _without_prefix(tag: str) -> str:
    """The trainer's name of an event file's tag: `train/loss` is loss, `eval/loss` eval_loss."""
    if tag.startswith("train/"):
        return tag.removeprefix("train/")
    return f"eval_{tag.removeprefix('eval/')}" if tag.startswith("eval/") else tag


def _read_state(path: Path) -> Log:
    log = Log()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("PATH", str(path), f"is not a readable trainer state ({error})") from error
    history = content.get("log_history") if isinstance(content, dict) else None
    for entry in history if isinstance(history, list) else []:
        log.metrics.setdefault(int(entry["step"]), {}).update(_numbers(entry))
    return log


def _read_console(path: Path) -> Log:
    log = Log()
    step = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for entry in _dictionaries(lines):
            numbers = _numbers(entry)
            step += int("loss" in numbers)
            log.metrics.setdefault(step, {}).update(numbers)
    return log


def _dictionaries(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        text = _ANSI.sub("", line).strip()
        if not (text.startswith("{'") and text.endswith("}")):
            continue
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            continue  # a line of the user's own that only looks like one
        if isinstance(value, dict) and "epoch" in value:
            yield value


def _numbers(entry: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in entry.items():
        if name == "step" or isinstance(value, bool):
            continue
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            continue  # texts, such as a run's name, are no metrics
    return found


def _steps(log: Log) -> list[ImportedStep]:
    steps = []
    previous_step, previous_tokens = 0, 0.0
    for number in sorted(log.metrics):
        logged = log.metrics[number]
        step = ImportedStep(number, foreign=dict(logged), unix_s=log.unix_s.get(number))
        step.wall_s = finite(logged, "step_time")
        step.metrics = {ours: logged[theirs] for theirs, ours in METRICS.items() if theirs in logged}
        if (seconds := finite(logged, "eval_runtime")) is not None:
            step.after_s["eval"] = seconds
        tokens = finite(logged, "num_tokens")
        if step.wall_s:
            step.metrics["time/step"] = step.wall_s
            if tokens is not None and number > previous_step:
                per_step = (tokens - previous_tokens) / (
                    number - previous_step
                )  # it counts from the run's begin
                step.metrics["throughput/tokens_per_s"] = per_step / step.wall_s
        if tokens is not None:
            previous_step, previous_tokens = number, tokens
        steps.append(step)
    return steps


def _notes(log: Log, steps: list[ImportedStep]) -> list[str]:
    timed = [step for step in steps if step.wall_s is not None]
    notes = []
    if timed:
        notes.append(
            "step_time is generation, scoring, forward and backward together: TRL logs no part of it, so all of it is "
            "unaccounted. The optimiser, logging and saving lie outside it."
        )
    else:
        notes.append(
            "No step_time is logged (only TRL's online trainers do), so there is no ledger of steps."
        )
    gaps = {after.step - before.step for before, after in pairwise(timed)}
    if gaps and max(gaps) > 1:
        notes.append(f"Each line is a mean over up to {max(gaps)} steps; one of them is drawn.")
    runtime = next(
        (value for step in steps if (value := finite(step.foreign, "train_runtime")) is not None), None
    )
    if runtime is not None and timed and not gaps - {1}:
        inside = sum((step.wall_s or 0.0) + sum(step.after_s.values()) for step in timed)
        notes.append(
            f"Of the {runtime:.4g} s of training, {runtime - inside:.4g} s lie outside steps and evaluations."
        )
    if not any(step.unix_s for step in timed):
        notes.append(
            "Lines carry no times, so steps follow each other without the gaps there were between them."
        )
    notes.append(
        "throughput/tokens_per_s is the difference of num_tokens over step_time; one process was logged."
    )
    return notes
