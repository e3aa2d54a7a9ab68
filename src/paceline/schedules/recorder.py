"""Writes a run down as it happens: metrics, samples, evaluations, checkpoints, the display and the summary."""

import math
from typing import Any, Literal

from paceline.config.rewards import scored_by_rules
from paceline.data.baseline import constant_baseline
from paceline.schedules.credit import CreditedBatch
from paceline.schedules.evaluation import Evaluation, evaluate
from paceline.schedules.rollouts import Rollout
from paceline.schedules.saving import save
from paceline.schedules.setup import Run
from paceline.schedules.step_metrics import (
    record_evaluation,
    record_rollout,
    sample_rows,
    shown_figures,
)
from paceline.schedules.together import reduce_metrics, restore_lost_metrics, time_step, write_metrics
from paceline.telemetry.metrics import MetricAccumulator

Status = Literal["running", "completed", "stopped", "failed"]

_SHOWN = (
    ("tokens/s", "throughput/tokens_per_s", ",.0f"),
    ("response tokens", "response_length/mean", ".1f"),
    ("accuracy held-out", "eval/accuracy", ".1%"),
    ("entropy", "entropy", ".2f"),
    ("explained variance", "critic/explained_variance", ".2f"),
)


class Recorder:
    """One per process. `metrics` is the accumulator of the step under way."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.metrics = MetricAccumulator()
        self.step_values: dict[str, float] = {}
        self._saved_step = run.state.step

    def begin(self, step: int) -> None:
        """A step starts."""
        self.metrics = MetricAccumulator()
        self._run.display.phase(f"step {step}")

    def rollout(self, rollout: Rollout, batch: CreditedBatch) -> None:
        """Samples are scored and credited."""
        run = self._run
        record_rollout(run, rollout, batch, self.metrics)
        every = run.config.run.save_samples_every
        if every and run.state.step % every == 0:
            step = run.state.step + 1
            run.folder.write_samples(step, sample_rows(step, rollout, batch))

    def evaluate_before(self) -> None:
        """Scores the untouched model once, and the best constant answer.

        A run resumed after a step has a trained model: what was not measured before step 1 stays unknown.
        """
        run = self._run
        if not run.task.evaluation or run.state.step > 0:
            return
        run.display.phase(f"evaluating {len(run.task.evaluation)} held-out prompts before training")
        evaluation = evaluate(run)
        self._keep_evaluation("before", evaluation)
        if run.mesh.is_first:
            self._score_constant_answer()
        values = MetricAccumulator()
        record_evaluation(run, evaluation, values)
        write_metrics(run, 0, values.reduce())
        run.display.note(f"  accuracy before training: {evaluation.accuracy:.1%}")

    def evaluate_if_due(self, step: int) -> None:
        """Evaluates every `run.eval_every` steps and after the last."""
        run = self._run
        every, last = run.config.run.eval_every, run.config.run.num_steps
        if not run.task.evaluation or not (step == last or (every and step % every == 0)):
            return
        run.display.phase(f"evaluating {len(run.task.evaluation)} held-out prompts")
        evaluation = evaluate(run)
        record_evaluation(run, evaluation, self.metrics)
        self._keep_evaluation("after", evaluation)

    def save_if_due(self, step: int) -> None:
        """Saves every `checkpoint.every` steps, after the last, and when asked to stop.

        Called after the new weights are published.
        """
        run, settings = self._run, self._run.config.checkpoint
        self.metrics.add("weight_version", run.engine.weight_version)
        run.instruments.count(self.metrics)
        self.step_values = reduce_metrics(run, self.metrics)
        run.state.figures["step_values"] = {name: str(value) for name, value in self.step_values.items()}
        is_last = step == run.config.run.num_steps and settings.save_final
        if run.stop_requested() or is_last or (settings.every and step % settings.every == 0):
            run.display.phase("saving a checkpoint")
            waits_before = run.store.num_waits
            self.step_values["checkpoint/blocked_s"] = save(run)
            self._saved_step = step
            self.step_values["checkpoint/waits"] = run.store.num_waits - waits_before

    def save_if_interrupted(self) -> None:
        """Saves the last step if a request to stop came after the step had looked for one."""
        run = self._run
        if run.stop_requested() and run.state.step != self._saved_step:
            save(run)
            self._saved_step = run.state.step

    def end(self, step: int) -> None:
        """The step's section is closed: its seconds are known."""
        run = self._run
        num_tokens = self.step_values["tokens/prompt"] + self.step_values["tokens/response"]
        timing = time_step(run, step, num_tokens)
        values = {**self.step_values, **timing.metrics, **run.instruments.metrics()}
        write_metrics(run, step, values)
        reward = values.get("reward/mean", math.nan)
        run.display.step(step, timing.wall_s, timing.stage_s, reward, shown_figures(values, _SHOWN))

    def restore_lost_record(self) -> None:
        """After a resume: the checkpointed step's metrics, if the process died between saving and recording them."""
        restore_lost_metrics(self._run)

    def summary(self, status: Status, message: str = "") -> dict[str, Any]:
        """Writes summary.json and returns it."""
        run = self._run
        figures = {name: value for name, value in run.state.figures.items() if name != "step_values"}
        decision = run.old_logprob
        summary = {
            "status": status,
            "message": message,
            "num_steps": run.state.step,
            "old_logprob": {"source": decision.source, "reason": decision.reason},
            **figures,
        }
        run.folder.write_summary(summary)
        return summary

    def _score_constant_answer(self) -> None:
        """The best constant answer, where scoring every answer to every prompt costs next to nothing."""
        run = self._run
        if not scored_by_rules(run.config):
            run.display.note("  constant answer: not measured, for a model or a service scores")
            return
        with run.ledger.span("eval", "constant answer", cause="queue"):
            baseline = constant_baseline(run.task.evaluation, run.pool)
        if baseline is not None:
            run.state.figures["accuracy_constant"] = baseline.accuracy
            run.state.figures["constant_answer"] = baseline.answer

    def _keep_evaluation(self, when: Literal["before", "after"], evaluation: Evaluation) -> None:
        accuracy = evaluation.accuracy
        self._run.state.figures |= {
            # unknown when scoring failed for every completion; a checkpoint refuses figures that are not finite
            f"accuracy_{when}": accuracy if math.isfinite(accuracy) else None,
            "num_eval_prompts": evaluation.num_prompts,
            "num_eval_completions": evaluation.num_completions,
            f"num_eval_without_verdict_{when}": evaluation.num_without_verdict,
        }
