"""Timelines: one step with all its spans, and the whole run."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import plotly.graph_objects as go

from paceline.report import formats
from paceline.report.charts_time import step_label
from paceline.report.palette import INK, MUTED, ON_STAGE, SETUP, STEP_SHADES, SURFACE, UNACCOUNTED, colour_of
from paceline.report.theme import Chart, new_figure
from paceline.report.timeline_bars import TimelineBar, gaps, median_step, merged
from paceline.report.words import Words
from paceline.telemetry.records import LedgerProcess, RankLedger, SectionRecord

_RESOLUTION = 1 / 2000
"""Spans shorter than this share of a timeline are narrower than half a pixel."""

_MAX_STEP_BARS = 1500

_DONE_AGAIN = "done again"
_STEP_BARS = ("steps", _DONE_AGAIN)

_LANES = (SETUP, "steps", "eval", "checkpoint", "background", UNACCOUNTED)


def step_timeline(ledger: RankLedger, words: Words) -> Chart | None:
    """Every span of the median step, by depth; None without a step."""
    found = median_step(ledger)
    if found is None:
        return None
    section, process = found
    spans = [span for span in process.spans if span.step == section.step and span.start_s >= section.start_s]
    resolution = section.wall_s * _RESOLUTION
    bars = [*merged(spans, resolution), *gaps(section, spans, resolution / 4)]
    figure = new_figure(
        barmode="overlay", bargap=0.1, uniformtext={"minsize": 10, "mode": "hide"}, margin={"l": 10}
    )
    by_stage: dict[str, list[TimelineBar]] = defaultdict(list)
    for bar in bars:
        by_stage[bar.stage].append(bar)
    for stage, members in by_stage.items():
        figure.add_trace(_span_bars(stage, members, section.start_s, words))
    depth = 1 + max((bar.depth for bar in bars), default=0)
    figure.update_yaxes(range=[depth - 0.45, -0.55], showticklabels=False, showgrid=False, fixedrange=True)
    figure.update_xaxes(title_text=words("timeline.axis"), range=[0, section.wall_s], showgrid=True)
    return Chart(
        "step-timeline",
        words("timeline.title", step=section.step),
        _step_caption(section, len(spans), len(bars), words),
        figure,
        height=86 + 34 * max(2, depth),
        zooms=True,
    )


def _step_caption(section: SectionRecord, num_spans: int, num_bars: int, words: Words) -> str:
    not_kept = section.num_spans_not_kept
    return words.sentences(
        words(
            "timeline.caption",
            time=formats.seconds(section.wall_s),
            unaccounted=formats.seconds(section.unaccounted_s),
        ),
        words("timeline.not-kept", count=f"{not_kept:,}") if not_kept else "",
        words("timeline.merged", spans=f"{num_spans:,}", bars=f"{num_bars:,}")
        if num_bars < num_spans
        else "",
    )


def _span_bars(stage: str, bars: Sequence[TimelineBar], origin_s: float, words: Words) -> go.Bar:
    return go.Bar(
        name=words.stage(stage),
        orientation="h",
        base=[round(bar.start_s - origin_s, 7) for bar in bars],
        x=[round(bar.end_s - bar.start_s, 7) for bar in bars],
        y=[bar.depth for bar in bars],
        text=[_label(bar, words) for bar in bars],
        textposition="inside",
        insidetextanchor="start",
        textangle=0,
        textfont={"color": INK.light if stage == "idle" else ON_STAGE.light, "size": 11},
        marker={"color": colour_of(stage).light, "line": {"width": 0.6, "color": SURFACE.light}},
        customdata=[[hover_of(bar, words)] for bar in bars],
        hovertemplate="%{customdata[0]}<extra></extra>",
    )


def _label(bar: TimelineBar, words: Words) -> str:
    name = words.stage(bar.stage) if bar.name in (bar.stage, "") else bar.name
    return name if bar.num_spans == 1 else f"{bar.num_spans} × {name}"


def hover_of(bar: TimelineBar, words: Words) -> str:
    """What a bar says under the pointer: stage and name, duration, tokens, FLOPs."""
    stage = words.stage(bar.stage) if bar.stage not in _STEP_BARS else bar.name
    title = stage if bar.name in (bar.stage, "", stage) else f"{stage} · {bar.name}"
    lines = [f"<b>{title}</b>", formats.seconds(bar.end_s - bar.start_s)]
    if bar.num_spans > 1:
        lines[1] = words("timeline.together", count=bar.num_spans, time=formats.seconds(bar.busy_s))
    if bar.tokens:
        lines.append(words.number_of("token", bar.tokens))
    if bar.flops:
        lines.append(formats.quantity(bar.flops, "FLOP"))
    return "<br>".join(lines)


def _lane_name(lane: str, words: Words) -> str:
    return words(f"lane.{lane}") if lane in ("steps", "background") else words.stage(lane)


def run_timeline(ledger: RankLedger, words: Words) -> Chart | None:
    """Set-up, steps, evaluations and checkpoints over the whole run; None when nothing was recorded."""
    processes = [process for process in ledger.processes if process.sections]
    if not processes:
        return None
    total_s = sum(_length(process) for process in processes)
    lanes: dict[str, list[TimelineBar]] = defaultdict(list)
    counted = {id(step) for step in ledger.steps()}
    figure = new_figure(barmode="overlay", bargap=0.25)
    offset_s = 0.0
    for index, process in enumerate(processes):
        _collect(process, offset_s, total_s * _RESOLUTION, counted, lanes, words)
        if index:
            _mark_restart(figure, offset_s, words("run.resumed"))
        offset_s += _length(process)
    scale, unit = formats.time_unit(total_s)
    shown = [lane for lane in _LANES if lanes[lane]]
    for lane in shown:
        figure.add_trace(_lane_bars(lane, lanes[lane], scale, words))
    for shape in figure.layout.shapes:
        shape.x0, shape.x1 = shape.x0 / scale, shape.x1 / scale
    for note in figure.layout.annotations:
        note.x = note.x / scale
    figure.update_yaxes(
        categoryorder="array",
        categoryarray=[_lane_name(lane, words) for lane in reversed(shown)],
        showgrid=False,
        fixedrange=True,
    )
    figure.update_xaxes(title_text=words(f"run.axis-{unit}"), range=[0, total_s / scale], showgrid=True)
    resumed = ""
    if len(processes) > 1:
        num_resumed = len(processes) - 1
        resumed = (
            words("run.resumed-once")
            if num_resumed == 1
            else words("run.resumed-often", count=f"{num_resumed:,}")
        )
        figure.update_layout(margin={"t": 22})
    caption = words.sentences(words("run.caption"), resumed)
    height = 84 + 27 * max(2, len(shown))
    return Chart("run-timeline", words("run.title"), caption, figure, height, zooms=True)


def _length(process: LedgerProcess) -> float:
    return max(section.end_s for section in process.sections)


def _mark_restart(figure: go.Figure, at_s: float, label: str) -> None:
    figure.add_vline(
        x=at_s,
        line={"width": 1, "dash": "dot", "color": INK.light},
        annotation={"text": label, "font": {"size": 10, "color": MUTED.light}, "yanchor": "bottom"},
        annotation_position="top",
    )


def _collect(
    process: LedgerProcess,
    offset_s: float,
    resolution_s: float,
    counted: set[int],
    lanes: dict[str, list[TimelineBar]],
    words: Words,
) -> None:
    """Sorts a process's time into lanes, shifted by `offset_s`."""

    def place(lane: str, bars: Sequence[TimelineBar]) -> None:
        lanes[lane] += [bar.shifted(offset_s) for bar in bars]

    outer = [span for span in process.spans if span.depth == 0]
    for stage in ("eval", "checkpoint"):
        place(stage, merged([span for span in outer if span.stage == stage], resolution_s))
    outside = [span for span in outer if span.step is None]
    place(SETUP, merged([s for s in outside if s.stage not in ("eval", "checkpoint")], resolution_s))
    place("steps", _step_bars([s for s in process.sections if s.step is not None], counted, words))
    place(
        "background",
        [
            TimelineBar(work.stage, work.name, 0, work.start_s, work.end_s, work.end_s - work.start_s)
            for work in process.background
        ],
    )
    for section in process.sections:
        if section.step is None:
            inside = [span for span in outside if section.start_s <= span.start_s < section.end_s]
            place(UNACCOUNTED, gaps(section, inside, resolution_s))


def _step_bars(steps: Sequence[SectionRecord], counted: set[int], words: Words) -> list[TimelineBar]:
    size = max(1, -(-len(steps) // _MAX_STEP_BARS))
    bars = []
    for start in range(0, len(steps), size):
        group = steps[start : start + size]
        first, last = group[0], group[-1]
        is_counted = any(id(step) in counted for step in group)
        name = step_label(group, words)
        bars.append(
            TimelineBar(
                "steps" if is_counted else _DONE_AGAIN,
                name if is_counted else words("step.again", name=name),
                start // size % 2,
                first.start_s,
                last.end_s,
                last.end_s - first.start_s,
            )
        )
    return bars


def _lane_bars(lane: str, bars: Sequence[TimelineBar], scale: float, words: Words) -> go.Bar:
    colour: Callable[[TimelineBar], str] = (
        _step_colour if lane == "steps" else lambda bar: colour_of(bar.stage).light
    )
    return go.Bar(
        name=_lane_name(lane, words),
        orientation="h",
        base=[round(bar.start_s / scale, 7) for bar in bars],
        x=[round((bar.end_s - bar.start_s) / scale, 7) for bar in bars],
        y=[_lane_name(lane, words)] * len(bars),
        marker={"color": [colour(bar) for bar in bars], "line": {"width": 0}},
        customdata=[[hover_of(bar, words)] for bar in bars],
        hovertemplate="%{customdata[0]}<extra></extra>",
    )


def _step_colour(bar: TimelineBar) -> str:
    """Steps alternate between two shades (`depth` holds the parity), so that their borders show."""
    if bar.stage == _DONE_AGAIN:
        return colour_of("idle").light
    return STEP_SHADES[bar.depth].light
