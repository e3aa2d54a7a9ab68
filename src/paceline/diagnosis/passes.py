"""Forward and backward passes of single micro-batches, as a run's spans tell them apart."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.diagnosis.estimates import PassTimes, fit_passes
from paceline.diagnosis.run_records import RankStep, RunRecords
from paceline.telemetry.records import SpanRecord
from paceline.telemetry.sections import NEW_SHAPE

UPDATE_STAGES = ("update_actor", "update_critic")
SCORE_STAGES = ("old_logprob", "ref_logprob", "values")

_MIN_REPEATED = 6
"""Passes of shapes met before that a line is fitted through; with fewer, all passes are taken."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One micro-batch: its token slots, seconds (waits inside excluded), and whether its shape was new."""

    slots: int
    seconds: float
    is_new: bool


def passes_of(step: RankStep, stage: str) -> list[Pass]:
    """A step's passes of a stage. An update's are a forward span and the backward span after it."""
    spans = sorted(step.named(stage), key=lambda span: span.start_s)
    if stage in SCORE_STAGES:
        return [Pass(span.tokens, span.self_s, _is_new(span)) for span in spans if _base(span) == "pass"]
    parts = [span for span in spans if _base(span) in ("forward", "backward")]
    return [
        Pass(backward.tokens, forward.self_s + backward.self_s, _is_new(backward))
        for forward, backward in pairwise(parts)
        if _base(forward) == "forward" and _base(backward) == "backward"
    ]


def all_passes(run: RunRecords, stage: str) -> list[Pass]:
    """Passes of a stage in all steps that count, of every rank."""
    return [
        one for steps in run.ranks.values() for step in run.steps for one in passes_of(steps[step], stage)
    ]


def repeated(passes: Iterable[Pass]) -> list[Pass]:
    """Those whose shape had been met before."""
    return [one for one in passes if not one.is_new]


def pass_times(passes: Sequence[Pass]) -> PassTimes | None:
    """What a pass takes by its size, from repeated shapes where there are enough of them."""
    usable = repeated(passes)
    chosen = usable if len(usable) >= _MIN_REPEATED else passes
    return fit_passes([one.slots for one in chosen], [one.seconds for one in chosen])


def has_enough_repeated(passes: Sequence[Pass]) -> bool:
    """Whether what a new shape costs can be told from passes of shapes met before."""
    return len(repeated(passes)) >= _MIN_REPEATED


def own_s(step: RankStep, stage: str) -> float:
    """Self-seconds of a stage's outermost spans: what it does between its passes."""
    return sum(span.self_s for span in step.named(stage, "") if span.cause is None)


def named_s(step: RankStep, stage: str, name: str) -> float:
    """Self-seconds of a stage's spans of one name, new shapes included."""
    return sum(span.self_s for span in step.named(stage) if _base(span) == name)


def _base(span: SpanRecord) -> str:
    return span.name.removesuffix(NEW_SHAPE)


def _is_new(span: SpanRecord) -> bool:
    return span.name.endswith(NEW_SHAPE)
