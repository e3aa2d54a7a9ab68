"""A step's figures: what rollout, credit, evaluation and the ledger say, as metrics and rows."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from paceline.algorithms.gae import explained_variance, masked_mean
from paceline.rewards.pool import reward_alarm
from paceline.schedules.credit import CreditedBatch
from paceline.schedules.evaluation import Evaluation
from paceline.schedules.rollouts import Rollout
from paceline.schedules.setup import Run
from paceline.schedules.sft_setup import SftRun
from paceline.telemetry.flops import mfu, mfu_alarm
from paceline.telemetry.hardware import known_peak_tflops
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
    metrics.add("samples/aborted", sum(sample.finish_reason == "abort" for sample in samples))
    metrics.add("truncated_fraction", truncated / max(1, len(samples)), len(samples))
    metrics.add("tokens/response", sum(lengths))
    metrics.add("tokens/prompt", sum(len(g.prompt.token_ids) * len(g.samples) for g in rollout.groups))
    metrics.add("tokens/loss", sum(sample.num_loss_tokens for sample in batch.samples))
    _record_verdicts(rollout, batch, metrics)
    if run.critic is not None:
        record_values(batch, metrics)
        metrics.add("steps/critic_alone", int(run.state.step < run.config.critic.pretrain_steps))
    metrics.add("rollout/generations", rollout.num_generations)
    metrics.add("rollout/exhausted", int(rollout.is_exhausted))
    metrics.add("rollout/prefill_tokens", stats.num_prefill_tokens)
    metrics.add("rollout/mean_running", stats.mean_running)
    metrics.add("rollout/cache_bytes", stats.cache_bytes)
    metrics.add("prompts/consumed", len(rollout.prompt_ids))
    metrics.add("epoch", run.loader.epoch)
    if alarm := reward_alarm(verdicts):
        run.display.note(f"  ALARM: {alarm}")


def _record_verdicts(rollout: Rollout, batch: CreditedBatch, metrics: MetricAccumulator) -> None:
    verdicts = rollout.verdicts
    metrics.add("reward/timeouts", sum(verdict.outcome == "timeout" for verdict in verdicts))
    metrics.add("reward/errors", sum(verdict.outcome == "error" for verdict in verdicts))
    metrics.add("samples/without_verdict", sum(verdict.score is None for verdict in verdicts))
    metrics.add("groups/dropped_no_verdict", sum(set(rewards) == {None} for rewards in batch.rewards))
    if batch.advantages is not None:
        metrics.add("groups/zero_signal", batch.advantages.num_zero_signal_groups)
        metrics.add("groups/singleton", batch.advantages.num_singleton_groups)
    metrics.add("groups/dropped_no_signal", rollout.num_groups_dropped)


def record_values(batch: CreditedBatch, metrics: MetricAccumulator) -> None:
    """What the critic said of the step's states before its update, against what came of them."""
    credited = [(s.values, s.returns, s.loss_mask) for s in batch.samples]
    values = [value_L for value_L, _, _ in credited if value_L is not None]
    returns = [return_L for _, return_L, _ in credited if return_L is not None]
    masks = [mask_L for _, _, mask_L in credited]
    num_tokens = sum(sample.num_loss_tokens for sample in batch.samples)
    for name, figure in (
        ("values/mean", masked_mean(values, masks)),
        ("returns/mean", masked_mean(returns, masks)),
        ("critic/explained_variance", explained_variance(values, returns, masks)),
    ):
        if figure is not None:
            metrics.add(name, figure, num_tokens)


def record_evaluation(evaluation: Evaluation, metrics: MetricAccumulator) -> None:
    """Held-out scores."""
    metrics.add("eval/accuracy", evaluation.accuracy)
    metrics.add("eval/mean_score", evaluation.mean_score)
    metrics.add("eval/completions", evaluation.num_completions)
    metrics.add("eval/without_verdict", evaluation.num_without_verdict)


def timing_metrics(run: Run | SftRun, section: SectionTotals, num_tokens: float) -> dict[str, float]:
    """What the ledger says of a finished step; these, unlike the rest, differ from run to run.

    `num_tokens` are prompt and response tokens of the step's samples.
    """
    metrics = MetricAccumulator()
    metrics.add("time/step", section.wall_s)
    metrics.add("time/unaccounted", section.unaccounted_s)
    for stage, seconds in section.stage_s.items():
        metrics.add(f"time/{stage}", seconds)
    metrics.add("throughput/tokens_per_s", num_tokens / section.wall_s)
    if spent := section.stage_s.get("rollout"):
        metrics.add("throughput/generated_tokens_per_s", section.stage_tokens["rollout"] / spent)
    metrics.add("memory/peak_allocated", section.memory.peak_allocated)
    metrics.add("memory/peak_reserved", section.memory.peak_reserved)
    metrics.add("memory/host_rss", section.memory.host_rss)
    _record_work(section, _peak_tflops(run), metrics)
    values = metrics.reduce()
    for alarm in mfu_alarms(values):
        run.display.note(f"  ALARM: {alarm}")
    return values


def _record_work(section: SectionTotals, peak_tflops: float | None, metrics: MetricAccumulator) -> None:
    """FLOP/s and MFU of every stage that declared FLOPs, and of the step."""
    work = [(stage, flops, section.stage_s[stage]) for stage, flops in section.stage_flops.items()]
    work.append(("step", sum(section.stage_flops.values()), section.wall_s))
    for name, flops, seconds in work:
        if seconds > 0 and flops:
            metrics.add(f"tflops/{name}", flops / seconds / 1e12)
            if (share := mfu(flops, seconds, 1, peak_tflops)) is not None:
                metrics.add(f"mfu/{name}", share)


def mfu_alarms(values: Mapping[str, float]) -> list[str]:
    """A sentence for every MFU among a step's metrics that cannot be true."""
    shares = {name: value for name, value in values.items() if name.startswith("mfu/")}
    return [f"{name}: {alarm}" for name, value in shares.items() if (alarm := mfu_alarm(value))]


def _peak_tflops(run: Run | SftRun) -> float | None:
    device = run.model.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    dtype = str(run.model.dtype).removeprefix("torch.")
    return known_peak_tflops(name, dtype, run.config.telemetry.peak_tflops)


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
                    "advantage": float(member.advantages[0]),
                    "value": None if member.values is None else float(member.values[0]),
                    "finish_reason": sample.finish_reason,
                    "num_tokens": len(sample.token_ids),
                    "weight_version": sample.weight_version,
                    "seed": sample.seed,
                }
            )
    return rows


def shown_figures(values: dict[str, float], names: Sequence[tuple[str, str, str]]) -> dict[str, str]:
    """Figures ready for the display: (label, metric, format) where the metric exists."""
    return {label: format(values[metric], form) for label, metric, form in names if metric in values}
