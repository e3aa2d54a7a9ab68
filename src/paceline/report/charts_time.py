"""Seconds of every step by stage, stacked; unaccounted time is a slice of its own."""

from collections.abc import Sequence

import plotly.graph_objects as go

from paceline.report import wording
from paceline.report.palette import UNACCOUNTED, colour_of, ordered
from paceline.report.theme import Chart, new_figure, number_steps
from paceline.telemetry.records import SectionRecord

_MAX_BARS = 160
"""More steps than this are averaged in equal runs of consecutive steps."""


def breakdown_chart(steps: Sequence[SectionRecord]) -> Chart | None:
    """One stacked bar per step (or per run of steps); None without steps."""
    if not steps:
        return None
    bins = runs_of_steps(steps, _MAX_BARS)
    size = len(bins[0])
    figure = new_figure(barmode="stack", hovermode="x unified")
    positions = [_middle(group) for group in bins]
    labels = [step_label(group) for group in bins]
    names = ordered({name for step in steps for name in step.stages} | {UNACCOUNTED})
    for name in names:
        seconds = [sum(stage_seconds(step, name) for step in group) / len(group) for group in bins]
        if any(seconds):
            figure.add_trace(_bars(name, positions, seconds, labels, size))
    number_steps(figure, positions[0], positions[-1])
    figure.update_yaxes(title_text="seconds", rangemode="tozero")
    if len(bins) == 1:
        figure.update_xaxes(tickvals=positions, range=[positions[0] - 4, positions[0] + 4])
    caption = "Self-time of every stage; a stack is as high as the step took."
    if size > 1:
        caption += f" Each bar is the mean of up to {size} consecutive steps."
    return Chart("breakdown", "Seconds per step, by stage", caption, figure, height=340, zooms=True)


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


def step_label(group: Sequence[SectionRecord]) -> str:
    """'step 7', or 'steps 7-9'."""
    first, last = group[0].step, group[-1].step
    return f"step {first}" if first == last else f"steps {first}–{last}"


def _middle(group: Sequence[SectionRecord]) -> float:
    numbers = [step.step for step in group if step.step is not None]
    return sum(numbers) / len(numbers)


def _bars(name: str, positions: list[float], seconds: list[float], labels: list[str], size: int) -> go.Bar:
    return go.Bar(
        name=name,
        x=positions,
        y=seconds,
        width=0.86 * size,
        marker={"color": colour_of(name).light, "line": {"width": 0}},
        customdata=[[label, wording.seconds(value)] for label, value in zip(labels, seconds, strict=True)],
        hovertemplate="%{customdata[1]}",
    )
