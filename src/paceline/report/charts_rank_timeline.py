"""What every rank did when: the run from end to end where that can be drawn, and single steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from paceline.report import formats
from paceline.report.palette import colour_of, ordered, stage_variable
from paceline.report.run_data import RunData
from paceline.report.theme import Chart, LegendPart, Variant, chart_of_variants, new_figure
from paceline.report.timeline_bars import TimelineBar, gaps, merged
from paceline.report.words import Words
from paceline.telemetry.records import LedgerProcess, RankLedger, SectionRecord

_RESOLUTION = 1 / 3000
"""Spans shorter than this share of what is shown are narrower than half a pixel."""

_MAX_BARS = 12_000
"""A browser draws so many bars at once and still zooms; a run with more is shown by single steps."""


@dataclass(frozen=True, slots=True)
class RankBars:
    """A rank's bars; times since the beginning of what is shown."""

    rank: int
    bars: Sequence[TimelineBar]


def rank_timeline(run: RunData, words: Words) -> Chart | None:
    """The whole run and four steps, behind buttons; None where no step was finished."""
    ledger = run.main_ledger
    if ledger is None or not run.steps:
        return None
    variants = []
    if run.detailed_steps is None and len(whole := whole_run(run.ledgers)):
        variants.append(_variant(words("ranks-timeline.whole"), whole, words))
    num_whole = len(variants)
    for key, number in chosen_steps(run.steps).items():
        bars = one_step(run, number)
        if bars:
            label = words(f"ranks-timeline.{key}", step=number)
            variants.append(_variant(label, bars, words))
    shown = ordered({trace.meta for variant in variants for trace in variant.figure.data})
    legend = [LegendPart(stage_variable(stage), words.stage(stage)) for stage in shown]
    caption = words.sentences(
        words("ranks-timeline.caption"), "" if num_whole else words("ranks-timeline.too-long")
    )
    return chart_of_variants("rank-timeline", words("ranks-timeline.title"), caption, variants, legend)


def chosen_steps(steps: Sequence[SectionRecord]) -> dict[str, int]:
    """The steps that are shown by themselves: of median duration, the slowest, first and last, each once."""
    by_time = sorted(steps, key=lambda step: step.wall_s)
    found = {
        "median": by_time[len(by_time) // 2].step,
        "slowest": by_time[-1].step,
        "first": steps[0].step,
        "last": steps[-1].step,
    }
    once: dict[str, int] = {}
    for key, number in found.items():
        if number is not None and number not in once.values():
            once[key] = number
    return once


def one_step(run: RunData, number: int) -> list[RankBars]:
    """A step of every rank that has it, against the moment at which the first of them began it."""
    found: list[tuple[int, LedgerProcess, SectionRecord]] = []
    for ledger in run.ledgers:
        section = next((step for step in run.rank_steps[ledger.rank] if step.step == number), None)
        process = None if section is None else _process_of(ledger, section)
        if section is not None and process is not None:
            found.append((ledger.rank, process, section))
    if not found:
        return []
    origin = min(process.unix_s + section.start_s for _, process, section in found)
    return [
        RankBars(rank, _bars_of([section], process, origin, section.wall_s * _RESOLUTION))
        for rank, process, section in found
    ]


def whole_run(ledgers: Sequence[RankLedger]) -> list[RankBars]:
    """Every rank from the first record to the last; empty where that is more than can be drawn."""
    processes = [process for ledger in ledgers for process in ledger.processes if process.sections]
    if not processes:
        return []
    origin = min(process.unix_s for process in processes)
    end = max(process.unix_s + process.sections[-1].end_s for process in processes)
    found = []
    num_bars = 0
    for ledger in ledgers:
        bars: list[TimelineBar] = []
        for process in ledger.processes:
            bars += _bars_of(process.sections, process, origin, (end - origin) * _RESOLUTION)
        found.append(RankBars(ledger.rank, bars))
        num_bars += len(bars)
        if num_bars > _MAX_BARS:
            return []
    return found


def _process_of(ledger: RankLedger, section: SectionRecord) -> LedgerProcess | None:
    """The process that ran a section; the last one's counts where a step was done again."""
    for process in reversed(ledger.processes):
        if any(own is section for own in process.sections):
            return process
    return None


def _bars_of(
    sections: Sequence[SectionRecord], process: LedgerProcess, origin: float, resolution_s: float
) -> list[TimelineBar]:
    """Outermost spans of sections and the gaps between them, as seconds since `origin` (Unix time)."""
    if len(sections) == 1:
        spans = [span for span in process.spans if span.depth == 0 and span.step == sections[0].step]
        spans = [span for span in spans if span.start_s >= sections[0].start_s]
    else:
        spans = [span for span in process.spans if span.depth == 0]
    bars = merged(spans, resolution_s)
    for section in sections:
        inside = [span for span in spans if section.start_s <= span.start_s < section.end_s]
        bars += gaps(section, inside, resolution_s)
    shift = process.unix_s - origin
    return [bar.shifted(shift) for bar in bars]


def _variant(label: str, ranks: Sequence[RankBars], words: Words) -> Variant:
    total_s = max(bar.end_s for rank in ranks for bar in rank.bars)
    scale, unit = formats.time_unit(total_s)
    figure = new_figure(barmode="overlay", bargap=0.12 if len(ranks) > 16 else 0.25)
    by_stage: dict[str, list[tuple[int, TimelineBar]]] = {}
    for rank in ranks:
        for bar in rank.bars:
            by_stage.setdefault(bar.stage, []).append((rank.rank, bar))
    row_of = {rank.rank: row for row, rank in enumerate(ranks)}
    for stage in ordered(set(by_stage)):
        figure.add_trace(_stage_bars(stage, by_stage[stage], row_of, scale, words(f"axis.{unit}"), words))
    every = -(-len(ranks) // 24)
    figure.update_yaxes(
        range=[len(ranks) - 0.4, -0.6],
        tickvals=list(range(0, len(ranks), every)),
        ticktext=[str(rank.rank) for rank in ranks[::every]],
        title_text=words("axis.rank"),
        showgrid=False,
        fixedrange=len(ranks) <= 16,
    )
    figure.update_xaxes(title_text=words(f"axis.{unit}"), range=[0, total_s / scale], showgrid=True)
    return Variant(label, figure, 76 + max(48, len(ranks) * (11 if len(ranks) > 16 else 26)))


def _stage_bars(
    stage: str,
    bars: Sequence[tuple[int, TimelineBar]],
    row_of: Mapping[int, int],
    scale: float,
    unit: str,
    words: Words,
) -> go.Bar:
    name = words.stage(stage)
    return go.Bar(
        name=name,
        meta=stage,
        orientation="h",
        base=np.array([bar.start_s / scale for _, bar in bars], dtype=np.float32),
        x=np.array([(bar.end_s - bar.start_s) / scale for _, bar in bars], dtype=np.float32),
        y=np.array([row_of[rank] for rank, _ in bars], dtype=np.int16),
        marker={"color": colour_of(stage).light, "line": {"width": 0}},
        customdata=np.array([rank for rank, _ in bars], dtype=np.int32),
        hovertemplate=words(
            "ranks-timeline.hover", stage=name, rank="%{customdata}", time="%{x:.4~g}", unit=unit
        )
        + "<extra></extra>",
    )
