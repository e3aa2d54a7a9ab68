"""verl's logs as an imported run: its stages in ours, its figures under our names, and what cannot be known."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from paceline.adapters.run.imported import GIB, ImportedRun, ImportedStep, StageTime
from paceline.adapters.run.logs import Log, finite, merged, read_tensorboard
from paceline.adapters.verl import names
from paceline.adapters.verl.logs import find_logs, read_console, read_file_logger
from paceline.adapters.verl.rollout_dumps import find_dumps, read_dump
from paceline.config.errors import ConfigError

Mode = Literal["auto", "sync", "async"]

MODES: tuple[Mode, ...] = ("auto", "sync", "async")

READERS = {"file": read_file_logger, "tensorboard": read_tensorboard, "console": read_console}
"""In the order of how exact they are: full precision; float32 with times; what a terminal shows."""

TIMING = "timing_s/"


def import_verl(path: Path, mode: Mode = "auto", name: str | None = None) -> ImportedRun:
    """Reads every log of one run at `path` (a file, or a folder that is searched).

    `mode` says whether the trainer waited for samples of engines that run beside it (then `gen` is a wait) or generated
    them itself; auto decides from what was logged, and notes why.

    Raises:
        ConfigError: nothing at `path` holds verl's step lines.
    """
    log, sources = _read(path)
    if not any(name.startswith(TIMING) for metrics in log.metrics.values() for name in metrics):
        rule = "holds no step of verl's: no console lines `step:N - ...`, no JSONL of its file logger, no event files"
        raise ConfigError("PATH", str(path), rule)
    is_async, why = _is_asynchronous(log, mode)
    builder = _Builder(is_async)
    steps = [builder.step(step, log.metrics[step]) for step in sorted(log.metrics)]
    for step in steps:
        step.unix_s = log.unix_s.get(step.step)
    run_name = name or (path.parent if path.is_file() else path).resolve().name
    run = ImportedRun("verl", run_name, steps, sources=sources, end_unix_s=_latest(sources))
    run.environment = _environment(log)
    run.notes = [why, *_notes(log, builder, steps)]
    if path.is_dir():
        _take_samples(run, path)
    return run


def _read(path: Path) -> tuple[Log, dict[str, str]]:
    found = find_logs(path)
    logs: list[Log] = []
    sources: dict[str, str] = {}
    for kind, reader in READERS.items():
        for place in found.get(kind, []):
            log = reader(place)
            if log.metrics:
                logs.append(log)
                sources[str(place)] = kind
    return merged(logs), sources


def _take_samples(run: ImportedRun, folder: Path) -> None:
    """The first and the last rollout dump: what a report shows. The others stay where they are."""
    dumps = find_dumps(folder)
    for step in sorted({*list(dumps)[:1], *list(dumps)[-1:]}):
        run.samples[step] = list(read_dump(dumps[step], step))
    if len(dumps) > len(run.samples):
        run.notes.append(f"Of {len(dumps)} rollout dumps the first and the last were taken over.")


def _latest(sources: dict[str, str]) -> float | None:
    times = [Path(place).stat().st_mtime for place in sources]
    return max(times) if times else None


def _is_asynchronous(log: Log, mode: Mode) -> tuple[bool, str]:
    if mode != "auto":
        return mode == "async", f"Taken as {mode} because --mode says so."
    every = {name for metrics in log.metrics.values() for name in metrics}
    hint = next((one for one in sorted(every) if one.startswith(names.ASYNCHRONOUS_HINTS)), None)
    if hint is None:
        stale = {name for name in every if name.startswith(names.STALENESS)}
        hint = next(
            (
                one
                for one in sorted(stale)
                if any(metrics.get(one, 0) > 0 for metrics in log.metrics.values())
            ),
            None,
        )
    if hint is None:
        text = "Taken as synchronous: nothing that only asynchronous trainers log is there (or say --mode async)."
        return False, text
    text = f"Taken as asynchronous because of {hint}: gen is then time the trainer waited for samples, shown as idle"
    return True, f"{text}; the engines' own time is not in the log."


class _Builder:
    """Turns one step's metrics into ours, and remembers what it met."""

    def __init__(self, is_async: bool) -> None:
        self.is_async = is_async
        self.unknown_times: dict[str, float] = {}
        self.num_without_time = 0

    def step(self, step: int, logged: dict[str, float]) -> ImportedStep:
        result = ImportedStep(step, foreign=dict(logged))
        result.wall_s = finite(logged, "timing_s/step")
        if result.wall_s is None:
            result.wall_s = finite(logged, "perf/time_per_step")
        result.metrics = self._metrics(logged, result.wall_s)
        if result.wall_s is None:
            self.num_without_time += 1
            return result
        self._times(logged, result)
        self._memory(logged, result)
        return result

    def _times(self, logged: dict[str, float], result: ImportedStep) -> None:
        total = finite(logged, "perf/total_num_tokens")
        for name, seconds in logged.items():
            short = name.removeprefix(TIMING)
            if short == name or short == "step" or short.startswith(names.INSIDE_OTHERS):
                continue
            if short in names.AFTER_STEP:
                result.after_s[names.AFTER_STEP[short]] = seconds
                continue
            stage = "sync" if short.startswith("switch_") else names.STAGES.get(short)
            if stage is None:
                self.unknown_times[short] = self.unknown_times.get(short, 0.0) + seconds
                continue
            stage = "idle" if stage == "rollout" and self.is_async else stage
            time = result.stages.setdefault(stage, StageTime(0.0))
            time.seconds += seconds
            if stage in names.ALL_TOKENS_STAGES and total is not None:
                time.tokens = round(total)
        if (rollout := result.stages.get("rollout")) and (tokens := _response_tokens(logged)):
            rollout.tokens = tokens
        order = {stage: index for index, stage in enumerate(dict.fromkeys(names.STAGES.values()))}
        result.stages = dict(sorted(result.stages.items(), key=lambda pair: order.get(pair[0], -1)))

    def _metrics(self, logged: dict[str, float], wall_s: float | None) -> dict[str, float]:
        found = {ours: logged[theirs] for theirs, ours in names.METRICS.items() if theirs in logged}
        for theirs, ours in names.MFU.items():
            if logged.get(theirs, 0.0) > 0:  # verl logs 0 for a model or device that it does not know
                found[ours] = logged[theirs]
        if wall_s is not None:
            found["time/step"] = wall_s
            for theirs, stage in names.STAGES.items():
                stage = "idle" if stage == "rollout" and self.is_async else stage
                if (seconds := finite(logged, f"{TIMING}{theirs}")) is not None:
                    found[f"time/{stage}"] = found.get(f"time/{stage}", 0.0) + seconds
        total = finite(logged, "perf/total_num_tokens")
        if total is not None and wall_s:
            found["throughput/tokens_per_s"] = total / wall_s
        tokens, seconds = _response_tokens(logged), finite(logged, "timing_s/gen")
        if tokens:
            found["tokens/response"] = tokens
            if total is not None and total >= tokens:
                found["tokens/prompt"] = total - tokens
            if seconds and not self.is_async:
                found["throughput/generated_tokens_per_s"] = tokens / seconds
        return found | _evaluation(logged)

    def _memory(self, logged: dict[str, float], result: ImportedStep) -> None:
        for theirs, kind in names.MEMORY.items():
            value = finite(logged, theirs)
            if value is None:
                continue
            result.metrics[f"memory/peak_{kind}"] = value * GIB
            if kind == "allocated":
                result.peak_allocated = round(value * GIB)
            else:
                result.peak_reserved = round(value * GIB)


def _response_tokens(logged: dict[str, float]) -> int | None:
    """Response tokens of the step: `timing_per_token_ms/gen` is the time of `gen` over them."""
    seconds, per_token = finite(logged, "timing_s/gen"), finite(logged, "timing_per_token_ms/gen")
    return round(seconds * 1000 / per_token) if seconds and per_token else None


def _evaluation(logged: dict[str, float]) -> dict[str, float]:
    """Means over the data sources of a validation: accuracies where it has them, and scores."""
    groups: dict[str, list[float]] = {"eval/accuracy": [], "eval/mean_score": []}
    for name, value in logged.items():
        if not name.startswith(("val-core/", "val/")):
            continue
        if "/acc/mean@" in name:
            groups["eval/accuracy"].append(value)
        elif "/reward/mean@" in name or name.startswith("val/test_score/"):
            groups["eval/mean_score"].append(value)
    return {name: sum(values) / len(values) for name, values in groups.items() if values}


def _environment(log: Log) -> dict[str, Any]:
    """Devices, which follow from tokens per second of all and of one."""
    counts = []
    for metrics in log.metrics.values():
        total, rate = finite(metrics, "perf/total_num_tokens"), finite(metrics, "perf/throughput")
        seconds = finite(metrics, "perf/time_per_step")
        if total and rate and seconds:
            counts.append(round(total / seconds / rate))
    if not counts:
        return {}
    return {"num_devices": max(set(counts), key=counts.count)}


def _notes(log: Log, builder: _Builder, steps: Sequence[ImportedStep]) -> list[str]:
    timed = [step for step in steps if step.wall_s is not None]
    notes = [
        "One process was logged, the driver: times are its wall clock without waiting for devices, there are no ranks, "
        "and nothing says what the devices did within a stage (an imported trace does).",
        "Stages are drawn one after another in the order verl runs them; when each began is not in the log.",
        "What no stage covers is unaccounted: balancing, queue traffic, dispatch. testing lies after the step.",
    ]
    if timed and not any(step.unix_s for step in timed):
        notes.append(
            "Lines carry no times, so steps follow each other without the gaps there were between them."
        )
    if any(step.stages.get("reward") for step in timed):
        notes.append("reward is the reward model on the trainer's devices; rule-based scoring is inside gen.")
    if any(step.peak_allocated for step in timed):
        notes.append(
            "Memory is of one rank and a high-water mark since recording began: it never falls and has no stage."
        )
    if any(name in step.metrics for step in steps for name in names.MFU.values()):
        notes.append(
            "MFU is verl's: N counts the embedding twice (input and head), attention is causal, no recomputation, "
            "against its own table of peaks; its timer, unlike update_actor, leaves loading parameters out."
        )
    if any("perf/total_num_tokens" in step.foreign for step in steps):
        notes.append("Token counts and tokens/s include padding rows that V1 adds to uneven batches.")
    if builder.unknown_times:
        listed = ", ".join(
            f"{name} ({total:.3g} s in all)" for name, total in sorted(builder.unknown_times.items())
        )
        notes.append(f"Times of unknown meaning, left in unaccounted: {listed}.")
    if builder.num_without_time:
        notes.append(
            f"{builder.num_without_time} lines have no step time (a validation before training) and no ledger entry."
        )
    return [*notes, *_imbalance(timed), *_damage(log, steps)]


def _imbalance(steps: Sequence[ImportedStep]) -> list[str]:
    """What the log says of long tails and uneven ranks; it has no times by rank."""
    notes = []
    prefix = "timing_s/agent_loop/generate_sequences"
    longest, mean = _mean_of(steps, f"{prefix}/max"), _mean_of(steps, f"{prefix}/mean")
    if longest and mean:
        notes.append(
            f"In the mean step the longest sample took {longest:.3g} s to generate and the mean one {mean:.3g} s: the "
            f"longest is {longest / mean:.2g} times the mean."
        )
    low, high = _mean_of(steps, "global_seqlen/balanced_min"), _mean_of(steps, "global_seqlen/balanced_max")
    if low and high:
        notes.append(
            f"After balancing, ranks have {low:,.0f} to {high:,.0f} tokens a step, {high / low - 1:.1%} apart."
        )
    return notes


def _mean_of(steps: Sequence[ImportedStep], name: str) -> float | None:
    values = [value for step in steps if (value := finite(step.foreign, name)) is not None]
    return sum(values) / len(values) if values else None


def _damage(log: Log, steps: Sequence[ImportedStep]) -> list[str]:
    notes = []
    numbers = [step.step for step in steps if step.wall_s is not None]
    if numbers and numbers[0] > 1:
        notes.append(
            f"The log begins at step {numbers[0]}: verl's file logger empties its file when a run is resumed."
        )
    missing = numbers[-1] - numbers[0] + 1 - len(numbers) if numbers else 0
    if missing:
        notes.append(f"{missing} steps between the first and the last are not in the log.")
    if log.num_replaced:
        notes.append(f"{log.num_replaced} steps were done again after a resume; the last time counts.")
    if log.num_torn_lines:
        notes.append(f"{log.num_torn_lines} lines are torn and were left out.")
    if log.num_unread:
        notes.append(f"{log.num_unread} values are no numbers and were left out.")
    return notes
