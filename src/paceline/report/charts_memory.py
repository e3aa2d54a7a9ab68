"""Memory by stage and over steps: device peaks and resident host memory."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from paceline.report import formats
from paceline.report.palette import ACCENT, REFERENCE, SECOND, ordered
from paceline.report.stage_totals import StageTotal
from paceline.report.theme import Chart, new_figure, number_steps
from paceline.report.words import Words
from paceline.telemetry.records import SectionRecord, StageRecord

_GIB = 2**30

_KINDS = (
    ("peak_allocated", "memory.allocated", ACCENT.light),
    ("peak_reserved", "memory.reserved", REFERENCE.light),
    ("host_rss", "memory.host", SECOND.light),
)


def memory_by_stage(totals: Mapping[str, StageTotal], words: Words) -> Chart | None:
    """Peak of every stage over the run, in GiB; None where no memory was sampled."""
    sampled = {name: total for name, total in totals.items() if any(_peaks(total).values())}
    if not sampled:
        return None
    names = ordered(set(sampled))[::-1]
    figure = new_figure(barmode="group", bargap=0.3, showlegend=True, legend={"traceorder": "reversed"})
    num_kinds = 0
    for kind, label, colour in reversed(_KINDS):
        values = [_peaks(sampled[name])[kind] for name in names]
        if any(values):
            num_kinds += 1
            figure.add_trace(_stage_bars(words(label), [words.stage(name) for name in names], values, colour))
    figure.update_xaxes(title_text=words("axis.gib"), showgrid=True)
    figure.update_yaxes(showgrid=False)
    has_device = any(total.peak_allocated for total in sampled.values())
    caption = words.sentences(words("memory.by-stage-caption"), "" if has_device else words("memory.cpu"))
    height = 90 + len(names) * (14 + 12 * num_kinds)
    return Chart("memory-stages", words("memory.by-stage"), caption, figure, height)


def _peaks(total: StageTotal) -> dict[str, int]:
    return {
        "peak_allocated": total.peak_allocated,
        "peak_reserved": total.peak_reserved,
        "host_rss": total.host_rss,
    }


def _stage_bars(label: str, names: list[str], values: list[int], colour: str) -> go.Bar:
    return go.Bar(
        name=label,
        orientation="h",
        x=[value / _GIB for value in values],
        y=names,
        marker={"color": colour},
        customdata=[formats.memory(value) for value in values],
        hovertemplate="%{y}: %{customdata}<extra>" + label + "</extra>",
    )


def memory_over_steps(steps: Sequence[SectionRecord], height: int, words: Words) -> Chart | None:
    """Largest memory of any stage in every step, in GiB; None where no memory was sampled."""
    figure = new_figure(showlegend=True, hovermode="x unified")
    numbers = [step.step for step in steps]
    for kind, label, colour in _KINDS:
        values = [max((_of(stage, kind) for stage in step.stages.values()), default=0) for step in steps]
        if any(values):
            figure.add_trace(
                go.Scatter(
                    name=words(label),
                    x=numbers,
                    y=[value / _GIB if value else None for value in values],
                    mode="lines" if len(steps) > 1 else "markers",
                    line={"color": colour, "width": 1.8},
                    customdata=[formats.memory(value) for value in values],
                    hovertemplate="%{customdata}",
                )
            )
    if not figure.data:
        return None
    number_steps(figure, numbers[0] or 0, numbers[-1] or 0, words("axis.step"))
    figure.update_yaxes(title_text=words("axis.gib"), rangemode="tozero")
    caption = words("memory.over-steps-caption")
    return Chart("memory-steps", words("memory.over-steps"), caption, figure, height, zooms=True)


def _of(stage: StageRecord, kind: str) -> int:
    match kind:
        case "peak_allocated":
            return stage.peak_allocated
        case "peak_reserved":
            return stage.peak_reserved
        case _:
            return stage.host_rss
