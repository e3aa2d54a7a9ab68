"""Memory against time in one step, over bands that say which stage ran."""

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from paceline.report.palette import ACCENT, SECOND, colour_of, ordered, stage_variable
from paceline.report.theme import Chart, LegendPart, new_figure
from paceline.report.timeline_bars import median_step, merged
from paceline.report.words import Words
from paceline.telemetry.device.records import DeviceSample, RankDevice
from paceline.telemetry.records import LedgerProcess, RankLedger, SectionRecord, SpanRecord

_GIB = 2**30
_RESOLUTION = 1 / 500


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """Memory in GiB against seconds since the step began."""

    key: str
    points: Sequence[tuple[float, float]]
    is_stepwise: bool


def memory_timeline(ledger: RankLedger, devices: Sequence[RankDevice], words: Words) -> Chart | None:
    """The median step's memory; None where no memory was sampled."""
    found = median_step(ledger)
    if found is None:
        return None
    section, process = found
    spans = [
        span
        for span in process.spans
        if span.depth == 0 and span.step == section.step and span.start_s >= section.start_s
    ]
    bars = merged(spans, section.wall_s * _RESOLUTION)
    samples = _samples(ledger.rank, devices, section, process)
    lines = [*_sampled(samples, section, process), *_by_stage(section, spans)]
    if not lines or not bars:
        return None
    figure = new_figure(showlegend=True, hovermode="x")
    top = 1.08 * max(value for line in lines for _, value in line.points)
    for bar in bars:
        figure.add_shape(
            type="rect",
            x0=bar.start_s - section.start_s,
            x1=bar.end_s - section.start_s,
            y0=0,
            y1=top,
            fillcolor=colour_of(bar.stage).light,
            opacity=0.2,
            line={"width": 0},
            layer="below",
        )
    for line, colour in zip(lines, (ACCENT, SECOND), strict=False):
        figure.add_trace(_trace(line, colour.light, words))
    figure.update_xaxes(title_text=words("timeline.axis"), range=[0, section.wall_s])
    figure.update_yaxes(title_text=words("axis.gib"), range=[0, top])
    legend = [
        LegendPart(stage_variable(stage), words.stage(stage)) for stage in ordered({b.stage for b in bars})
    ]
    caption = words("memory.timeline-caption" if not samples else "memory.timeline-sampled")
    title = words("memory.timeline", step=section.step, rank=ledger.rank)
    return Chart("memory-timeline", title, caption, figure, 250, True, legend=tuple(legend))


def _samples(
    rank: int, devices: Sequence[RankDevice], section: SectionRecord, process: LedgerProcess
) -> list[DeviceSample]:
    start, end = process.unix_s + section.start_s, process.unix_s + section.end_s
    found = next((device for device in devices if device.rank == rank), None)
    samples = [] if found is None else found.between(start, end)
    return samples if len(samples) >= 4 else []  # fewer draw no line through the step's stages


def _sampled(
    samples: Sequence[DeviceSample], section: SectionRecord, process: LedgerProcess
) -> list[MemoryLine]:
    origin = process.unix_s + section.start_s
    device = [
        (sample.unix_s - origin, sample.device.memory_used / _GIB)
        for sample in samples
        if sample.device is not None and sample.device.memory_used is not None
    ]
    host = [
        (sample.unix_s - origin, sample.host.process_rss / _GIB)
        for sample in samples
        if sample.host is not None
    ]
    points = device or host
    return (
        [MemoryLine("memory.device-used" if device else "memory.host-used", points, False)] if points else []
    )


def _by_stage(section: SectionRecord, spans: Sequence[SpanRecord]) -> list[MemoryLine]:
    """The peak of the stage that ran, from span to span."""
    on_device = any(stage.peak_allocated for stage in section.stages.values())
    points: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start_s):
        stage = section.stages.get(span.stage)
        peak = 0 if stage is None else stage.peak_allocated if on_device else stage.host_rss
        if peak:
            points.append((span.start_s - section.start_s, peak / _GIB))
            points.append((span.end_s - section.start_s, peak / _GIB))
    return (
        [MemoryLine("memory.stage-peak" if on_device else "memory.stage-host", points, True)]
        if points
        else []
    )


def _trace(line: MemoryLine, colour: str, words: Words) -> go.Scatter:
    return go.Scatter(
        name=words(line.key),
        x=[x for x, _ in line.points],
        y=[y for _, y in line.points],
        mode="lines",
        line={"color": colour, "width": 2, "shape": "hv" if line.is_stepwise else "linear"},
        hovertemplate="%{y:.3f} GiB",
    )
