"""The figures of a run: what `paceline report --json` prints, and what the page's tiles and sentences say."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.report.counters import counters
from paceline.report.intervals import difference_interval, wilson_interval
from paceline.report.palette import TRAINING_STAGES
from paceline.report.run_data import RunData, load_run
from paceline.report.stage_totals import peak_of, stage_totals
from paceline.report.words import Words
from paceline.telemetry.flops import mfu
from paceline.telemetry.records import summarise

FIGURES_VERSION = 1

_ENGLISH = Words("en")
"""Names of counters are the same in every language, but for values that are not finite."""

_NO_LEDGER: Mapping[str, Any] = {
    "num_steps": 0,
    "step_time_s": None,
    "step_time_median_s": None,
    "stages": {},
    "unaccounted_s": None,
    "accounted_fraction": None,
    "accounted_fraction_run": None,
    "wall_s": None,
}


def report_figures(run_dir: Path) -> dict[str, Any]:
    """A run's figures, ready for JSON: None stands for what is not known, never a guess, nan or infinity.

    Times in seconds and memory in bytes, of the lowest rank. Keys: `run`, `status`, `message`, `model`, `task`,
    `algorithm`, `device`, `num_ranks`, `num_steps`, `num_untimed_steps` (warm-up or profiled: in no time or rate
    of a step, unless all were), `num_warmup_steps` among them, `step_time_s` (mean), `step_time_median_s`, `stages`
    (mean self-seconds per step), `unaccounted_s` (mean per step), `accounted_fraction` (of the steps' wall time),
    `accounted_fraction_run` (of everything recorded), `wall_s`, `update_actor_share` and `non_training_share` (of step
    time), `tokens_per_s` and `generated_tokens_per_s`, `mfu` (of the actor update) and `mfu_step` (of the whole step),
    `tflops_update_actor`, `peak_tflops`, `accuracy_before`, `accuracy_after`, `accuracy_constant`, `constant_answer`,
    `accuracy_before_interval` and the like (95 %), `reward_first`, `reward_last`, of a supervised run
    `eval_loss_before`, `eval_loss_after` (nats per learned token), `perplexity_before`, `perplexity_after` and
    `num_eval_rows`, `effective_token_share`,
    `peak_memory`, `counters` (those that are not zero).

    Raises:
        FileNotFoundError: `run_dir` is not the folder of a run.
        ValueError: a record is of a version this paceline does not read.
    """
    return figures_of(load_run(run_dir))


def figures_of(run: RunData) -> dict[str, Any]:
    """`report_figures` of records already read."""
    ledger = summarise(run.main_ledger, run.timed_steps) if run.main_ledger else dict(_NO_LEDGER)
    figures = {
        "v": FIGURES_VERSION,
        **identity(run),
        "num_ranks": len(run.ledgers),
        **ledger,
        "num_untimed_steps": len(run.untimed),
        "num_warmup_steps": len(run.untimed & run.warmup),
        **_shares(ledger),
        **_speed(run),
        **accuracy(run),
        **_reward(run),
        **_held_out_loss(run),
        "effective_token_share": _mean(value for _, value in run.series("tokens/effective_share")),
        "peak_memory": _peak_memory(run),
        "counters": {counter.name: counter.total for counter in counters(run, _ENGLISH)},
    }
    return {name: _json_value(value) for name, value in figures.items()}


def identity(run: RunData) -> dict[str, Any]:
    """What ran: name, status, model, task, algorithm, device."""
    model_path = run.setting("model.path")
    task = run.setting("task.name") or run.setting("task.path")
    return {
        "run": run.setting("run.name") or run.run_dir.resolve().name,
        "status": run.summary.get("status", "unknown"),
        "message": run.summary.get("message") or None,
        "model": Path(model_path).name if model_path else None,
        "task": str(task) if task else None,
        "algorithm": "sft" if is_supervised(run) else run.setting("algorithm.name"),
        "device": device_name(run.environment),
    }


def is_supervised(run: RunData) -> bool:
    """Whether the run is one of `paceline sft`, which has no rollouts and no rewards."""
    return bool(run.setting("schedule.name") == "sft")


def device_name(environment: Mapping[str, Any]) -> str | None:
    """The accelerator's name, or the processor's where training ran on the CPU."""
    if name := environment.get("device_name"):
        return str(name)
    cpu = environment.get("cpu")
    if environment.get("device") == "cpu" and isinstance(cpu, Mapping):
        cores = cpu.get("num_usable_cores") or cpu.get("num_cores")
        return f"{cpu.get('model', 'CPU')}" + (f", {cores} cores" if cores else "")
    device = environment.get("device")
    return str(device) if device else None


def _shares(ledger: Mapping[str, Any]) -> dict[str, float | None]:
    stages, step_time = ledger["stages"], ledger["step_time_s"]
    if not step_time:
        return {"update_actor_share": None, "non_training_share": None}
    training = sum(stages.get(stage, 0.0) for stage in TRAINING_STAGES)
    return {
        "update_actor_share": stages.get("update_actor", 0.0) / step_time,
        "non_training_share": 1.0 - training / step_time,
    }


def _speed(run: RunData) -> dict[str, float | None]:
    """Rates over all timed steps: all work over all seconds, not a mean of rates."""
    totals = stage_totals(run.timed_steps)
    peak = peak_of(run)
    wall = sum(step.wall_s for step in run.timed_steps)
    flops = sum(total.flops for total in totals.values())
    actor = totals.get("update_actor")
    has_actor = actor is not None and actor.flops > 0 and actor.self_s > 0
    return {
        "tokens_per_s": _time_weighted(run, "throughput/tokens_per_s", "time/step"),
        "generated_tokens_per_s": _time_weighted(run, "throughput/generated_tokens_per_s", "time/rollout"),
        "mfu": mfu(actor.flops, actor.self_s, 1, peak) if actor and has_actor else _logged_mfu(run),
        "mfu_step": mfu(flops, wall, 1, peak) if flops > 0 and wall > 0 else None,
        "tflops_update_actor": actor.flops / actor.self_s / 1e12 if actor and has_actor else None,
        "peak_tflops": peak,
    }


def _logged_mfu(run: RunData) -> float | None:
    """What another framework logged, by its own convention, where the ledger of an imported run has no FLOPs."""
    if run.summary.get("status") != "imported":
        return None
    return _mean(value for _, value in run.series("mfu/update_actor"))


def _time_weighted(run: RunData, rate: str, seconds: str) -> float | None:
    amount = total = 0.0
    untimed = run.untimed
    for record in run.history.records:
        if record.step in untimed:
            continue
        value, duration = record.metrics.get(rate, math.nan), record.metrics.get(seconds, math.nan)
        if math.isfinite(value) and math.isfinite(duration):
            amount += value * duration
            total += duration
    return amount / total if total > 0 else None


def accuracy(run: RunData) -> dict[str, Any]:
    """Held-out accuracy before and after, with intervals; from the metrics where the summary is missing.

    Prompts are the independent trials: several completions of one prompt do not count as several.
    """
    points = [(step, value) for step, value in run.series("eval/accuracy") if math.isfinite(value)]
    summary = run.summary
    before = summary.get("accuracy_before", points[0][1] if points and points[0][0] == 0 else None)
    after = summary.get("accuracy_after", points[-1][1] if points and points[-1][0] > 0 else None)
    num_prompts = summary.get("num_eval_prompts") or (run.setting("task.eval_size") if points else None)
    before, after = _proportion(before), _proportion(after)
    change = None
    if before is not None and after is not None and num_prompts:
        change = difference_interval(before, num_prompts, after, num_prompts)
    return {
        "accuracy_before": before,
        "accuracy_after": after,
        "accuracy_constant": _proportion(summary.get("accuracy_constant")),
        "constant_answer": summary.get("constant_answer"),
        "num_eval_prompts": num_prompts,
        "accuracy_before_interval": _interval(before, num_prompts),
        "accuracy_after_interval": _interval(after, num_prompts),
        "accuracy_change_interval": change,
    }


def _proportion(value: Any) -> float | None:
    is_share = isinstance(value, int | float) and math.isfinite(value) and 0.0 <= value <= 1.0
    return float(value) if is_share else None


def _interval(value: float | None, num_trials: int | None) -> tuple[float, float] | None:
    return wilson_interval(value, num_trials) if value is not None and num_trials else None


def _reward(run: RunData) -> dict[str, float | None]:
    values = [value for _, value in run.series("reward/mean") if math.isfinite(value)]
    return {
        "reward_first": values[0] if values else None,
        "reward_last": values[-1] if values else None,
    }


def _held_out_loss(run: RunData) -> dict[str, float | None]:
    """Held-out loss of a supervised run before and after; from the metrics where the summary is missing."""
    points = [(step, value) for step, value in run.series("eval/loss") if math.isfinite(value)]
    first = points[0][1] if points and points[0][0] == 0 else None
    last = points[-1][1] if points and points[-1][0] > 0 else None
    before = run.summary.get("eval_loss_before", first)
    after = run.summary.get("eval_loss_after", last)
    return {
        "eval_loss_before": before,
        "eval_loss_after": after,
        "perplexity_before": None if before is None else _exp(before),
        "perplexity_after": None if after is None else _exp(after),
        "num_eval_rows": run.summary.get("num_eval_rows"),
    }


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700.0 else math.inf


def _peak_memory(run: RunData) -> dict[str, int | None]:
    """Largest of any stage, in steps or outside, of any rank; None where nothing was sampled."""
    allocated = reserved = host = 0
    for ledger in run.ledgers:
        for process in ledger.processes:
            for section in process.sections:
                allocated = max(allocated, section.peak_allocated)
                reserved = max(reserved, section.peak_reserved)
                host = max(host, section.host_rss)
                if section.host_rss == 0:  # written before sections held peaks of their own
                    stages = section.stages.values()
                    allocated = max(allocated, *(stage.peak_allocated for stage in stages), 0)
                    reserved = max(reserved, *(stage.peak_reserved for stage in stages), 0)
                    host = max(host, *(stage.host_rss for stage in stages), 0)
    return {
        "device_allocated": allocated or None,
        "device_reserved": reserved or None,
        "host_rss": host or None,
    }


def _mean(values: Iterable[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


def _json_value(value: Any) -> Any:
    """The value with whatever JSON cannot say replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _json_value(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_json_value(inner) for inner in value]
    return value
