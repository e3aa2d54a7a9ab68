"""Seconds of every step by stage, stacked; unaccounted time is a slice of its own."""

from collections.abc import Sequence

import plotly.graph_objects as go

from paceline.report import formats
from paceline.report.palette import UNACCOUNTED, colour_of, ordered, stage_variable
from paceline.report.theme import Chart, LegendPart, new_figure, number_steps
from paceline.report.words import Words
from paceline.telemetry.records import SectionRecord

_MAX_BARS = 160
"""More steps than this are averaged in equal runs of consecutive steps."""


def breakdown_chart(steps: Sequence[SectionRecord], words: Words) -> Chart | None:
    """One stacked bar per step (or per run of steps); None without steps."""
    if not steps:
        return None
    bins = runs_of_steps(steps, _MAX_BARS)
    size = len(bins[0])
    figure = new_figure(barmode="stack", hovermode="x unified")
    positions = [_middle(group) for group in bins]
    labels = [step_label(group, words) for group in bins]
    names = ordered({name for step in steps for name in step.stages} | {UNACCOUNTED})
    shown = []
    for name in names:
        seconds = [sum(stage_seconds(step, name) for step in group) / len(group) for group in bins]
        if any(seconds):
            shown.append(name)
            figure.add_trace(_bars(name, words.stage(name), positions, seconds, labels, size))
    number_steps(figure, positions[0], positions[-1], words("axis.step"))
    figure.update_yaxes(title_text=words("axis.seconds"), rangemode="tozero")
    if len(bins) == 1:
        figure.update_xaxes(tickvals=positions, range=[positions[0] - 4, positions[0] + 4])
    binned = words("breakdown.binned", count=size) if size > 1 else ""
    caption = words.sentences(words("breakdown.caption"), binned)
    drawn = [LegendPart(stage_variable(name), words.stage(name)) for name in shown]
    return Chart("breakdown", words("breakdown.title"), caption, figure, 340, True, legend=tuple(drawn))


def stage_seconds(step: SectionRecord, name: str) -> float:
    """Self-seconds of a stage in a step, or of no stage."""
    if name == UNACCOUNTED:
        return step.unaccounted_s
    stage = step.stages.get(name)
    return stage.self_s if stage is not None else 0.0


def runs_of_steps(steps: Sequence[SectionRecord], max_runs: int) -> list[Sequence[SectionRecord]]:
    """Cuts steps into at most `max_runs` runs of equally many consecutive ones (the last may be shorter)."""
    size = -(-len(steps) // max_runs)
    return [steps[start : start + size] for start in range(0, len(steps), size)]


def step_label(group: Sequence[SectionRecord], words: Words) -> str:
    """'step 7', or 'steps 7-9'."""
    first, last = group[0].step, group[-1].step
    return words("step.one" if first == last else "step.range", first=first, last=last)


def _middle(group: Sequence[SectionRecord]) -> float:
    numbers = [step.step for step in group if step.step is not None]
    return sum(numbers) / len(numbers)


def _bars(
    name: str, shown: str, positions: list[float], seconds: list[float], labels: list[str], size: int
) -> go.Bar:
    return go.Bar(
        name=shown,
        x=positions,
        y=seconds,
        width=0.86 * size,
        marker={"color": colour_of(name).light, "line": {"width": 0}},
        customdata=[[label, formats.seconds(value)] for label, value in zip(labels, seconds, strict=True)],
        hovertemplate="%{customdata[1]}",
    )
