"""Two runs in one chart: stages side by side, step time and reward over steps."""

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from paceline.report import formats
from paceline.report.charts_learning import line_of
from paceline.report.comparison import STEP, Change
from paceline.report.palette import ACCENT, SECOND
from paceline.report.run_data import RunData
from paceline.report.theme import Chart, new_figure, number_steps
from paceline.report.words import Words

COLOURS = (SECOND, ACCENT)
"""The first run's, the second run's."""


def stages_side_by_side(changes: Sequence[Change], names: tuple[str, str], words: Words) -> Chart | None:
    """Mean seconds per step of every stage in both runs."""
    stages = [change for change in changes if change.stage != STEP][::-1]
    if not stages:
        return None
    figure = new_figure(
        barmode="group", bargap=0.3, showlegend=True, legend={"traceorder": "reversed"}, margin={"t": 26}
    )
    labels = [words.stage(change.stage) for change in stages]
    values = ([change.first_s for change in stages], [change.second_s for change in stages])
    for index in (1, 0):
        figure.add_trace(
            go.Bar(
                name=names[index],
                orientation="h",
                x=values[index],
                y=labels,
                marker={"color": COLOURS[index].light, "line": {"width": 0}},
                customdata=[formats.seconds(value) for value in values[index]],
                hovertemplate="%{y}: %{customdata}<extra>%{fullData.name}</extra>",
            )
        )
    figure.update_xaxes(title_text=words("axis.seconds"), showgrid=True)
    figure.update_yaxes(showgrid=False)
    height = 90 + 34 * len(stages)
    return Chart("compare-stages", words("compare.stages"), words("compare.stages-caption"), figure, height)


def step_times(
    first: RunData, second: RunData, names: tuple[str, str], height: int, words: Words
) -> Chart | None:
    """Seconds of every step of both runs."""
    series = [[(step.step or 0, step.wall_s) for step in run.steps] for run in (first, second)]
    return _over_steps("compare-time", "compare.time", series, names, "axis.seconds", words, height)


def metric_over_steps(
    key: str, metric: str, first: RunData, second: RunData, names: tuple[str, str], words: Words
) -> Chart | None:
    """A metric of both runs; None where neither recorded it."""
    series = [run.series(metric) for run in (first, second)]
    return _over_steps(f"compare-{key}", f"compare.{key}", series, names, None, words)


def _over_steps(
    key: str,
    title: str,
    series: Sequence[list[tuple[int, float]]],
    names: tuple[str, str],
    unit: str | None,
    words: Words,
    height: int = 260,
) -> Chart | None:
    numbers = [step for line in series for step, value in line if math.isfinite(value)]
    if not numbers:
        return None
    figure = new_figure(showlegend=True, hovermode="x unified")
    for line, name, colour in zip(series, names, COLOURS, strict=True):
        if line:
            figure.add_trace(line_of(name, line, colour.light, 1.9))
    number_steps(figure, min(numbers), max(numbers), words("axis.step"))
    if unit:
        figure.update_yaxes(title_text=words(unit), rangemode="tozero")
    return Chart(key, words(title), words(f"{title}-caption"), figure, height, True)
