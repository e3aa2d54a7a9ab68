"""A step's figures: what rollout, credit, evaluation and the ledger say, as metrics and rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from paceline.engine.samples import TrainSample
from paceline.rewards.pool import reward_alarm
from paceline.schedules.credit import CreditedBatch
from paceline.schedules.evaluation import Evaluation
from paceline.schedules.rollouts import Rollout
from paceline.schedules.setup import Run
from paceline.telemetry.flops import mfu
from paceline.telemetry.hardware import lookup
from paceline.telemetry.ledger import SectionTotals
from paceline.telemetry.metrics import MetricAccumulator


def record_rollout(run: Run, rollout: Rollout, batch: CreditedBatch, metrics: MetricAccumulator) -> None:
    """Everything known once a step's samples are scored and credited."""
    samples, verdicts, stats = rollout.samples, rollout.verdicts, run.engine.stats
    lengths = [len(sample.token_ids) for sample in samples]
    scores = np.array([verdict.score for verdict in verdicts if verdict.score is not None])
    rewards = np.array([r for group in batch.rewards for r in group if r is not None])
    if len(scores):
        metrics.add("reward/mean", float(rewards.mean()), len(rewards))
        metrics.add("reward/std", float(rewards.std()), len(rewards))
        metrics.add("reward/max", float(rewards.max()))
        metrics.add("accuracy/train", float((scores >= 1.0).mean()), len(scores))
    for length in lengths:
        metrics.add("response_length/mean", length)
        metrics.add("response_length/max", length)
        metrics.add("response_length/min", length)
    truncated = sum(sample.finish_reason == "length" for sample in samples)
    metrics.add("samples/truncated", truncated)
    metrics.add("truncated_fraction", truncated / max(1, len(samples)), len(samples))
    metrics.add("tokens/response", sum(lengths))
    metrics.add("tokens/prompt", sum(len(g.prompt.token_ids) * len(g.samples) for g in rollout.groups))
    metrics.add("tokens/loss", sum(sample.num_loss_tokens for sample in batch.samples))
    _record_verdicts(rollout, batch, metrics)
    metrics.add("rollout/generations", rollout.num_generations)
    metrics.add("rollout/exhausted", int(rollout.is_exhausted))
    metrics.add("rollout/prefill_tokens", stats.num_prefill_tokens)
    metrics.add("rollout/mean_running", stats.mean_running)
    metrics.add("rollout/cache_bytes", stats.cache_bytes)
    metrics.add("weight_version", run.engine.weight_version)
    if alarm := reward_alarm(verdicts):
        run.display.note(f"  ALARM: {alarm}")


def _record_verdicts(rollout: Rollout, batch: CreditedBatch, metrics: MetricAccumulator) -> None:
    verdicts = rollout.verdicts
    metrics.add("reward/timeouts", sum(verdict.outcome == "timeout" for verdict in verdicts))
    metrics.add("reward/errors", sum(verdict.outcome == "error" for verdict in verdicts))
    metrics.add("samples/without_verdict", batch.advantages.num_without_verdict)
    metrics.add("groups/zero_signal", batch.advantages.num_zero_signal_groups)
    metrics.add("groups/singleton", batch.advantages.num_singleton_groups)
    metrics.add("groups/dropped_no_verdict", batch.advantages.num_dropped_groups)
    metrics.add("groups/dropped_no_signal", rollout.num_groups_dropped)


def record_evaluation(evaluation: Evaluation, metrics: MetricAccumulator) -> None:
    """Held-out scores."""
    metrics.add("eval/accuracy", evaluation.accuracy)
    metrics.add("eval/mean_score", evaluation.mean_score)
    metrics.add("eval/completions", evaluation.num_completions)
    metrics.add("eval/without_verdict", evaluation.num_without_verdict)


def timing_metrics(run: Run, section: SectionTotals, num_generated: float) -> dict[str, float]:
    """What the ledger says of a finished step; these, unlike the rest, differ from run to run."""
    metrics = MetricAccumulator()
    metrics.add("time/step", section.wall_s)
    metrics.add("time/unaccounted", section.unaccounted_s)
    for stage, seconds in section.stage_s.items():
        metrics.add(f"time/{stage}", seconds)
    tokens = section.stage_tokens.get("update_actor", 0)
    metrics.add("throughput/tokens_per_s", (num_generated + tokens) / section.wall_s)
    if spent := section.stage_s.get("rollout"):
        metrics.add("throughput/generated_tokens_per_s", num_generated / spent)
    peak = known_peak_tflops(run)
    for name, stages in (("update_actor", ("update_actor",)), ("step", tuple(section.stage_flops))):
        flops = sum(section.stage_flops.get(stage, 0.0) for stage in stages)
        seconds = section.stage_s.get(name, 0.0) if name != "step" else section.wall_s
        if seconds and flops:
            metrics.add(f"tflops/{name}", flops / seconds / 1e12)
            if (share := mfu(flops, seconds, 1, peak)) is not None:
                metrics.add(f"mfu/{name}", share)
    return metrics.reduce()


def known_peak_tflops(run: Run) -> float | None:
    """Peak of one device in TFLOP/s: the recipe's, or the table's; None on hardware neither knows."""
    if run.config.telemetry.peak_tflops is not None:
        return run.config.telemetry.peak_tflops
    if run.model.device.type != "cuda":
        return None
    hardware = lookup(torch.cuda.get_device_name(run.model.device))
    return None if hardware is None else hardware.bf16_tflops


def sample_rows(step: int, rollout: Rollout, batch: CreditedBatch) -> list[dict[str, Any]]:
    """Rows of samples/step{n}.jsonl."""
    rows = []
    for group, members, rewards in zip(rollout.groups, batch.groups, batch.rewards, strict=True):
        for sample, verdict, member, reward in zip(
            group.samples, group.verdicts, members, rewards, strict=True
        ):
            rows.append(
                {
                    "step": step,
                    "prompt_id": sample.prompt_id,
                    "sample_index": sample.sample_index,
                    "prompt": group.prompt.text,
                    "completion": sample.text,
                    "answer": group.prompt.answer,
                    "outcome": verdict.outcome,
                    "score": verdict.score,
                    "message": verdict.message,
                    "reward": reward,
                    "advantage": _first(member),
                    "finish_reason": sample.finish_reason,
                    "num_tokens": len(sample.token_ids),
                    "weight_version": sample.weight_version,
                    "seed": sample.seed,
                }
            )
    return rows


def _first(member: TrainSample) -> float:
    return float(member.advantages[0])


def shown_figures(values: dict[str, float], names: Sequence[tuple[str, str, str]]) -> dict[str, str]:
    """Figures ready for the display: (label, metric, format) where the metric exists."""
    return {label: format(values[metric], form) for label, metric, form in names if metric in values}
