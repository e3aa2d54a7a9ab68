"""Held-out accuracy: the same prompts, seeds and scoring before, during and after training."""

from dataclasses import dataclass

from paceline.schedules.rollouts import generate_groups, rollout_request
from paceline.schedules.setup import Run

_EVALUATION_STEP = -1
"""Takes the place of the step in an evaluation's seeds, so that every evaluation draws the same numbers."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of one evaluation. A completion without a verdict counts in neither sum nor number."""

    num_prompts: int
    num_completions: int
    num_without_verdict: int
    num_correct: int
    mean_score: float

    @property
    def accuracy(self) -> float:
        """Share of completions with a full score (1.0 or more)."""
        scored = self.num_completions - self.num_without_verdict
        return self.num_correct / scored if scored else float("nan")


def evaluate(run: Run) -> Evaluation:
    """Scores every held-out prompt `task.eval_samples` times with the current weights."""
    task = run.config.task
    requests = [
        rollout_request(run, prompt, task.eval_samples, _EVALUATION_STEP) for prompt in run.task.evaluation
    ]
    with run.ledger.span("eval", absorb=True):
        groups = generate_groups(run, requests, task.eval_temperature)
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    scores = [verdict.score for verdict in verdicts if verdict.score is not None]
    return Evaluation(
        num_prompts=len(requests),
        num_completions=len(verdicts),
        num_without_verdict=len(verdicts) - len(scores),
        num_correct=sum(score >= 1.0 for score in scores),
        mean_score=sum(scores) / len(scores) if scores else float("nan"),
    )
