"""Spans to the bars of a timeline: gaps made visible, and what no screen could show drawn together."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.report.palette import UNACCOUNTED
from paceline.telemetry.records import LedgerProcess, RankLedger, SectionRecord, SpanRecord


@dataclass(frozen=True, slots=True)
class TimelineBar:
    """A bar: one span, or `num_spans` short neighbours of one depth drawn as one. Times in seconds."""

    stage: str
    name: str
    depth: int
    start_s: float
    end_s: float
    busy_s: float
    num_spans: int = 1
    tokens: int = 0
    flops: float = 0.0

    def shifted(self, seconds: float) -> "TimelineBar":
        """The same bar so much later."""
        return replace(self, start_s=self.start_s + seconds, end_s=self.end_s + seconds)


def median_step(ledger: RankLedger) -> tuple[SectionRecord, LedgerProcess] | None:
    """The step of median duration, and the process that ran it; None without a step."""
    steps = sorted(ledger.steps(), key=lambda step: step.wall_s)
    if not steps:
        return None
    chosen = steps[len(steps) // 2]
    # the last process that has the step is the one whose section counts
    for process in reversed(ledger.processes):
        if any(section is chosen for section in process.sections):
            return chosen, process
    return None


def gaps(section: SectionRecord, spans: Iterable[SpanRecord], shortest_s: float) -> list[TimelineBar]:
    """Time of a section that no span of depth 0 covers, as bars; gaps below `shortest_s` are left out.

    None are drawn where the ledger did not keep every span, since a missing span would look like a gap.
    """
    if section.num_spans_not_kept:
        return []
    found = []
    reached = section.start_s
    outer = sorted((span for span in spans if span.depth == 0), key=lambda span: span.start_s)
    for start_s, end_s in [*((span.start_s, span.end_s) for span in outer), (section.end_s, section.end_s)]:
        if start_s - reached >= shortest_s:
            found.append(TimelineBar(UNACCOUNTED, UNACCOUNTED, 0, reached, start_s, start_s - reached))
        reached = max(reached, end_s)
    return found


def merged(spans: Sequence[SpanRecord], resolution_s: float) -> list[TimelineBar]:
    """Spans as bars. Neighbours of one depth that are all shorter than `resolution_s`, and no further apart, become one
    bar in the colour of the stage that holds most of its time."""
    bars: list[TimelineBar] = []
    for depth in sorted({span.depth for span in spans}):
        run: list[SpanRecord] = []
        for span in sorted((s for s in spans if s.depth == depth), key=lambda s: s.start_s):
            is_short = span.end_s - span.start_s < resolution_s
            if run and not (
                is_short and _is_run_short(run, resolution_s) and span.start_s - run[-1].end_s < resolution_s
            ):
                bars.append(_bar(run))
                run = []
            run.append(span)
        if run:
            bars.append(_bar(run))
    return bars


def _is_run_short(run: Sequence[SpanRecord], resolution_s: float) -> bool:
    return run[-1].end_s - run[-1].start_s < resolution_s


def _bar(run: Sequence[SpanRecord]) -> TimelineBar:
    busy: defaultdict[str, float] = defaultdict(float)
    for span in run:
        busy[span.stage] += span.end_s - span.start_s
    stage = max(busy, key=lambda name: busy[name])
    names = {span.name or span.stage for span in run if span.stage == stage}
    return TimelineBar(
        stage=stage,
        name=names.pop() if len(names) == 1 else stage,
        depth=run[0].depth,
        start_s=run[0].start_s,
        end_s=run[-1].end_s,
        busy_s=sum(busy.values()),
        num_spans=len(run),
        tokens=sum(span.tokens for span in run),
        flops=sum(span.flops for span in run),
    )
