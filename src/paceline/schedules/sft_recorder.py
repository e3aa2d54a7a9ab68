"""Writes a supervised run down as it happens: metrics, held-out loss, checkpoints, the display and the summary."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Literal

from paceline.data.sft import SftRow
from paceline.engine.sft import HeldOutLoss
from paceline.schedules.recorder import Status
from paceline.schedules.saving import save
from paceline.schedules.sft_setup import SftRun
from paceline.schedules.step_metrics import shown_figures
from paceline.schedules.together import reduce_metrics, restore_lost_metrics, time_step, write_metrics
from paceline.telemetry.metrics import MetricAccumulator

_SHOWN = (
    ("tokens/s", "throughput/tokens_per_s", ",.0f"),
    ("perplexity held-out", "eval/perplexity", ",.2f"),
    ("entropy", "entropy", ".2f"),
    ("gradient norm", "grad_norm", ".2f"),
)


class SftRecorder:
    """One per process. `metrics` is the accumulator of the step under way."""

    def __init__(self, run: SftRun) -> None:
        self._run = run
        self.metrics = MetricAccumulator()
        self.step_values: dict[str, float] = {}
        self._saved_step = run.state.step

    def begin(self, step: int) -> None:
        """A step starts."""
        self.metrics = MetricAccumulator()
        self._run.display.phase(f"step {step}")

    def rows(self, rows: Sequence[SftRow]) -> None:
        """The rows of a step are drawn."""
        if not self._run.mesh.is_first:
            return  # what all ranks know alike, the first records
        learned = sum(row.num_loss_tokens for row in rows)
        self.metrics.add("rows/learned", len(rows))
        self.metrics.add("tokens/loss", learned)
        self.metrics.add("tokens/response", learned)
        self.metrics.add("tokens/prompt", sum(len(row.token_ids) for row in rows) - learned)
        self.metrics.add("prompts/consumed", len(rows))
        self.metrics.add("epoch", self._run.loader.epoch)

    def evaluate_before(self) -> None:
        """Loss of the untouched model, and what happened to the rows on the way; once, before step 1."""
        run = self._run
        if run.state.step > 0:
            return
        values = MetricAccumulator()
        for name, count in asdict(run.data.counts).items():
            values.add(f"rows/{name}", count)
        if run.evaluation:
            run.display.phase(f"evaluating {len(run.evaluation)} held-out rows before training")
            found = self._evaluate("before", values)
            run.display.note(
                f"  held-out loss before training: {found.loss:.4f} (perplexity {found.perplexity:,.2f})"
            )
        write_metrics(run, 0, values.reduce())

    def evaluate_if_due(self, step: int) -> None:
        """Evaluates every `run.eval_every` steps and after the last."""
        run = self._run
        every = run.config.run.eval_every
        if run.evaluation and (step == run.num_steps or (every and step % every == 0)):
            run.display.phase(f"evaluating {len(run.evaluation)} held-out rows")
            self._evaluate("after", self.metrics)

    def save_if_due(self, step: int) -> None:
        """Saves every `checkpoint.every` steps, after the last, and when asked to stop."""
        run, settings = self._run, self._run.config.checkpoint
        self.metrics.add("weight_version", run.weight_version)
        run.instruments.count(self.metrics)
        self.step_values = reduce_metrics(run, self.metrics)
        run.state.figures["step_values"] = {name: str(value) for name, value in self.step_values.items()}
        is_last = step == run.num_steps and settings.save_final
        if run.stop_requested() or is_last or (settings.every and step % settings.every == 0):
            run.display.phase("saving a checkpoint")
            waits_before = run.store.num_waits
            self.step_values["checkpoint/blocked_s"] = save(run)
            self._saved_step = step
            self.step_values["checkpoint/waits"] = run.store.num_waits - waits_before

    def save_if_interrupted(self) -> None:
        """Saves the last step if a request to stop came after the step had looked for one."""
        if self._run.stop_requested() and self._run.state.step != self._saved_step:
            save(self._run)
            self._saved_step = self._run.state.step

    def end(self, step: int) -> None:
        """The step's section is closed: its seconds are known."""
        run = self._run
        num_tokens = self.step_values["tokens/prompt"] + self.step_values["tokens/response"]
        timing = time_step(run, step, num_tokens)
        values = {**self.step_values, **timing.metrics, **run.instruments.metrics()}
        write_metrics(run, step, values)
        loss = values.get("loss/total", math.nan)
        run.display.step(step, timing.wall_s, timing.stage_s, loss, shown_figures(values, _SHOWN))

    def restore_lost_record(self) -> None:
        """After a resume: the checkpointed step's metrics, if the process died between saving and recording them."""
        restore_lost_metrics(self._run)

    def summary(self, status: Status, message: str = "") -> dict[str, Any]:
        """Writes summary.json and returns it."""
        run = self._run
        figures = {name: value for name, value in run.state.figures.items() if name != "step_values"}
        summary = {
            "status": status,
            "message": message,
            "num_steps": run.state.step,
            "num_steps_planned": run.num_steps,
            "num_rows": len(run.data.train),
            "rows": asdict(run.data.counts),
            **figures,
        }
        run.folder.write_summary(summary)
        return summary

    def _evaluate(self, when: Literal["before", "after"], metrics: MetricAccumulator) -> HeldOutLoss:
        run = self._run
        found = run.trainer.evaluate(run.evaluation)
        if run.mesh.is_first:
            metrics.add("eval/loss", found.loss, found.num_tokens)
            metrics.add("eval/perplexity", found.perplexity, found.num_tokens)
            metrics.add("eval/tokens", found.num_tokens)
        run.state.figures |= {
            # a loss beyond 700 nats has no perplexity; a checkpoint refuses figures that are not finite
            f"eval_loss_{when}": found.loss if math.isfinite(found.loss) else None,
            f"perplexity_{when}": found.perplexity if math.isfinite(found.perplexity) else None,
            "num_eval_rows": found.num_rows,
        }
        return found
