"""A step's figures: what rollout, credit, evaluation and the ledger say, as metrics and rows."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.algorithms.gae import explained_variance, masked_mean
from paceline.rewards.combination import SourcedRewards
from paceline.rewards.pool import reward_alarm
from paceline.rollout.protocol import RolloutStats
from paceline.schedules.agent_setup import record_agent
from paceline.schedules.credit import CreditedBatch
from paceline.schedules.evaluation import Evaluation
from paceline.schedules.rollouts import Rollout
from paceline.schedules.setup import Run
from paceline.schedules.tail import tail_figures
from paceline.telemetry.metrics import MetricAccumulator
from paceline.types import Verdict


def record_rollout(run: Run, rollout: Rollout, batch: CreditedBatch, metrics: MetricAccumulator) -> None:
    """Everything known once a step's samples are scored and credited; of what all ranks know, the first records."""
    _record_engine(run.rollout_stats, metrics)
    if run.replay is None:
        _record_tail(run, metrics)
        _record_over_sampling(run, metrics)
    if run.agent is not None:
        record_agent(run.agent.counts, metrics)
    if isinstance(run.pool, SourcedRewards):
        for metric, count in run.pool.take_counts().items():
            metrics.add(metric, count)
    if not run.mesh.is_first:
        return
    samples, verdicts = rollout.samples, rollout.verdicts
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
    metrics.add("tokens/prompt", sum(len(sample.prompt_ids) for sample in batch.samples))
    metrics.add("tokens/loss", sum(sample.num_loss_tokens for sample in batch.samples))
    _record_verdicts(rollout, batch, metrics)
    _record_sources(run, rollout, metrics)
    if run.critic is not None:
        record_values(batch, metrics)
        metrics.add("steps/critic_alone", int(run.state.step < run.config.critic.pretrain_steps))
    metrics.add("rollout/generations", rollout.num_generations)
    metrics.add("rollout/exhausted", int(rollout.is_exhausted))
    metrics.add("prompts/consumed", len(rollout.prompt_ids))
    metrics.add("epoch", run.loader.epoch)
    for alarm in reward_alarms(verdicts):
        run.display.note(f"  ALARM: {alarm}")


def _record_over_sampling(run: Run, metrics: MetricAccumulator) -> None:
    found = run.over_sampled
    if found is None:
        return
    num_groups = len({sample.prompt_id for sample in found.dropped})
    metrics.add("rollout/dropped_groups", num_groups)
    metrics.add("rollout/dropped_samples", len(found.dropped))
    metrics.add("rollout/dropped_tokens", found.num_dropped_tokens)
    if found.dropped:
        metrics.add("rollout/dropped_length_ratio", found.length_ratio, len(found.dropped))


def _record_tail(run: Run, metrics: MetricAccumulator) -> None:
    """How this rank's last rollout ended."""
    figures = tail_figures(run.finish_s, run.config.rollout.max_running)
    if figures is None:
        return
    metrics.add("rollout/finish_p50_s", figures.p50_s)
    metrics.add("rollout/finish_p90_s", figures.p90_s)
    metrics.add("rollout/finish_p99_s", figures.p99_s)
    metrics.add("rollout/finish_last_s", figures.last_s)
    metrics.add("rollout/tail_s", figures.tail_s)
    metrics.add("rollout/tail_idle_s", figures.idle_s)


def _record_engine(stats: RolloutStats, metrics: MetricAccumulator) -> None:
    """What this rank's own engine did."""
    metrics.add("rollout/prefill_tokens", stats.num_prefill_tokens)
    metrics.add("rollout/mean_running", stats.mean_running, stats.num_decode_steps)
    metrics.add("rollout/cache_bytes", stats.cache_bytes)
    metrics.add("rollout/preemptions", stats.num_preemptions)
    metrics.add("rollout/preempted_tokens", stats.num_preempted_tokens)
    metrics.add("rollout/drafted_tokens", stats.num_drafted_tokens)
    metrics.add("rollout/accepted_drafts", stats.num_accepted_drafts)
    metrics.add("rollout/cached_tokens", stats.num_cached_tokens)
    metrics.add("rollout/redone_samples", stats.num_redone_samples)
    metrics.add("rollout/dead_replicas", stats.num_dead_replicas)
    metrics.add("rollout/refusals", stats.num_refusals)


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


def _record_sources(run: Run, rollout: Rollout, metrics: MetricAccumulator) -> None:
    """Scores and failures of every source of the reward."""
    for name, parts in parts_by_source(rollout.verdicts).items():
        scores = [part.score for part in parts if part.score is not None]
        if scores:
            metrics.add(f"reward/{name}/mean", sum(scores) / len(scores), len(scores))
        for outcome, key in (("error", "errors"), ("timeout", "timeouts")):
            metrics.add(f"reward/{name}/{key}", sum(part.outcome == outcome for part in parts))
    if isinstance(run.pool, SourcedRewards):
        for name, count in run.pool.left_out(rollout.groups).items():
            metrics.add(f"reward/{name}/left_out", count)


def parts_by_source(verdicts: Sequence[Verdict]) -> dict[str, list[Verdict]]:
    """Verdicts of each source by its name; empty where the reward has one source only."""
    found: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        for name, part in (verdict.parts or {}).items():
            found.setdefault(name, []).append(part)
    return found


def reward_alarms(verdicts: Sequence[Verdict]) -> list[str]:
    """Sentences when scoring looks broken: as a whole, or one source of several."""
    found = {"": reward_alarm(verdicts)}
    found |= {
        f"reward source {name}: ": reward_alarm(parts) for name, parts in parts_by_source(verdicts).items()
    }
    return [f"{where}{alarm}" for where, alarm in found.items() if alarm is not None]


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


def record_evaluation(run: Run, evaluation: Evaluation, metrics: MetricAccumulator) -> None:
    """Held-out scores, which every rank knows and the first records."""
    if not run.mesh.is_first:
        return
    if evaluation.num_without_verdict < evaluation.num_completions:
        metrics.add("eval/accuracy", evaluation.accuracy)
        metrics.add("eval/mean_score", evaluation.mean_score)
    metrics.add("eval/completions", evaluation.num_completions)
    metrics.add("eval/without_verdict", evaluation.num_without_verdict)


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
                    "sources": _source_columns(verdict),
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


def _source_columns(verdict: Verdict) -> dict[str, dict[str, Any]] | None:
    """What every source said of one sample; None where the reward has one source only."""
    if verdict.parts is None:
        return None
    return {
        name: {"outcome": part.outcome, "score": part.score, "message": part.message}
        for name, part in verdict.parts.items()
    }


def shown_figures(values: dict[str, float], names: Sequence[tuple[str, str, str]]) -> dict[str, str]:
    """Figures ready for the display: (label, metric, format) where the metric exists."""
    return {label: format(values[metric], form) for label, metric, form in names if metric in values}
