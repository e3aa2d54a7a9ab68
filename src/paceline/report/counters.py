"""What was skipped, dropped, lost or not finite: every count that is not zero, so that nothing is silent."""

import math
from dataclasses import dataclass

from paceline.report.run_data import RunData
from paceline.report.words import Words

FAULTS = (
    "reward/errors",
    "reward/timeouts",
    "samples/without_verdict",
    "eval/without_verdict",
    "updates/skipped",
    "updates/empty",
    "critic/updates/skipped",
    "critic/updates/empty",
    "groups/dropped_no_verdict",
    "rollout/exhausted",
    "samples/aborted",
    "device/samples_failed",
)
"""Something failed, or a step could not do what it was asked to."""

LOSSES = (
    "samples/truncated",
    "samples/overlong",
    "critic/samples/overlong",
    "steps/critic_alone",
    "samples/masked",
    "groups/zero_signal",
    "groups/singleton",
    "groups/dropped_no_signal",
    "samples/zero_advantage_skipped",
    "tokens/zero_advantage_skipped",
    "checkpoint/waits",
    "rows/overlong_dropped",
    "rows/truncated",
    "rows/tokens_truncated",
    "rows/mismatched",
    "rows/split",
    "rows/without_loss_tokens",
    "rows/without_end_token",
    "rows/duplicates",
)
"""Expected in a healthy run; worth knowing because work or signal is lost."""

SOURCE_FAULTS = ("errors", "timeouts", "left_out", "overlong", "unparseable")
SOURCE_LOSSES = ("retries", "workers_replaced")
"""The same of every reward source: `reward/<source>/errors` and so on."""

_SHOWN_STEPS = 6


@dataclass(frozen=True, slots=True)
class Counter:
    """A total over the run that is not zero."""

    name: str
    total: float
    where: str
    meaning: str
    is_fault: bool


def counters(run: RunData, words: Words) -> list[Counter]:
    """All counts that are not zero, faults first."""
    sources = run.reward_sources
    faults = (*FAULTS, *(f"reward/{source}/{kind}" for source in sources for kind in SOURCE_FAULTS))
    losses = (*LOSSES, *(f"reward/{source}/{kind}" for source in sources for kind in SOURCE_LOSSES))
    found = [
        *(_from_metric(run, name, words, is_fault=True) for name in faults),
        *_non_finite(run, words),
        *_damage(run, words),
        *(_from_metric(run, name, words, is_fault=False) for name in losses),
    ]
    return [counter for counter in found if counter is not None]


def _from_metric(run: RunData, name: str, words: Words, is_fault: bool) -> Counter | None:
    series = run.series(name)
    hits = [(step, value) for step, value in series if math.isfinite(value) and value != 0]
    if not hits:
        return None
    total = sum(value for _, value in hits)
    where = words("counters.steps-of", hits=len(hits), all=len(series))
    if len(hits) <= _SHOWN_STEPS and len(hits) < len(series):
        listed = _listed([step for step, _ in hits])
        where = words("counters.steps-of-listed", hits=len(hits), all=len(series), steps=listed)
    return Counter(name, total, where, words.metric(name), is_fault)


def _listed(steps: list[int]) -> str:
    return ", ".join(str(step) for step in steps)


def _steps_where(steps: list[int], words: Words) -> str:
    listed = _listed(steps[:_SHOWN_STEPS]) + (" ..." if len(steps) > _SHOWN_STEPS else "")
    return words("counters.at-step" if len(steps) == 1 else "counters.at-steps", steps=listed)


def _non_finite(run: RunData, words: Words) -> list[Counter]:
    """Metrics that were nan or infinite at some step."""
    steps_by_name: dict[str, list[int]] = {}
    for record in run.history.records:
        for name, value in record.metrics.items():
            if not math.isfinite(value):
                steps_by_name.setdefault(name, []).append(record.step)
    return [
        Counter(
            words("counters.not-finite", name=name),
            len(steps),
            _steps_where(steps, words),
            words("counters.not-finite-meaning"),
            is_fault=True,
        )
        for name, steps in steps_by_name.items()
    ]


def _damage(run: RunData, words: Words) -> list[Counter]:
    """What interruptions left in the records, and what the ledger did not keep."""
    ledgers = run.ledgers
    num_restarts = sum(max(0, len(ledger.processes) - 1) for ledger in ledgers[:1])
    num_not_kept = sum(
        section.num_spans_not_kept
        for ledger in ledgers
        for process in ledger.processes
        for section in process.sections
    )
    torn = sum(ledger.num_torn_lines for ledger in ledgers) + run.history.num_torn_lines
    impossible = sum(value > 1.0 for _, value in run.series("mfu/update_actor"))
    rows = (
        ("records/impossible_mfu", impossible, "in-steps", "impossible-mfu", True),
        ("records/torn_lines", torn, "in-records", "torn-lines", True),
        ("run/restarts", num_restarts, "in-run", "restarts", False),
        ("run/steps_done_again", run.history.num_replaced, "in-run", "done-again", False),
        ("records/spans_not_kept", num_not_kept, "in-timelines", "spans-not-kept", False),
    )
    return [
        Counter(name, total, words(f"counters.{where}"), words(f"counters.{meaning}"), is_fault)
        for name, total, where, meaning, is_fault in rows
        if total
    ]
