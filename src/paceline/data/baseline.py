"""What a model scores that always says the same: the accuracy a task gives away for nothing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.types import Prompt, RewardJob, Scorer

MAX_CANDIDATES = 64
"""At most so many reference answers are tried, the most frequent ones."""


@dataclass(frozen=True, slots=True)
class ConstantBaseline:
    """The best constant answer. `mean_score` and `accuracy` (share of full scores) are over scored prompts."""

    answer: str
    accuracy: float
    mean_score: float
    num_candidates: int
    num_candidates_left_out: int
    num_without_verdict: int


def constant_baseline(
    prompts: Sequence[Prompt],
    scorer: Scorer,
    extra_candidates: Sequence[str] = (),
    max_candidates: int = MAX_CANDIDATES,
) -> ConstantBaseline | None:
    """The one completion with the highest accuracy over all prompts (then mean score, then earliest candidate).

    Candidates are `extra_candidates` (all of them) and the `max_candidates` most frequent reference answers; each is
    scored on every prompt, so `len(prompts) x candidates` scorings are made. None when there is no candidate or no
    prompt, or no scoring gave a verdict.
    """
    frequency = Counter(prompt.answer for prompt in prompts if prompt.answer is not None)
    candidates = list(
        dict.fromkeys([*extra_candidates, *(a for a, _ in frequency.most_common(max_candidates))])
    )
    num_left_out = max(0, len(frequency) - max_candidates)
    verdicts = scorer.score(
        [
            RewardJob(prompt.text, candidate, prompt.answer, prompt.metadata)
            for candidate in candidates
            for prompt in prompts
        ]
    )
    best: ConstantBaseline | None = None
    for index, candidate in enumerate(candidates):
        rows = verdicts[index * len(prompts) : (index + 1) * len(prompts)]
        scores = [verdict.score for verdict in rows if verdict.score is not None]
        if not scores:
            continue
        found = ConstantBaseline(
            candidate,
            sum(score >= 1.0 for score in scores) / len(scores),
            sum(scores) / len(scores),
            len(candidates),
            num_left_out,
            len(rows) - len(scores),
        )
        if best is None or (found.accuracy, found.mean_score) > (best.accuracy, best.mean_score):
            best = found
    return best
