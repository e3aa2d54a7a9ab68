"""Rewards by source: the mean score of each of several."""

import math

from paceline.report.charts_learning import line_of
from paceline.report.palette import line_colour
from paceline.report.run_data import RunData
from paceline.report.theme import Chart, new_figure, number_steps
from paceline.report.words import Words


def source_chart(run: RunData, words: Words) -> Chart | None:
    """Mean score of every source over the steps; None where there is one source only."""
    figure = new_figure(showlegend=True, hovermode="x unified")
    numbers: list[int] = []
    for index, name in enumerate(run.reward_sources):
        series = run.series(f"reward/{name}/mean")
        if any(math.isfinite(value) for _, value in series):
            figure.add_trace(line_of(name, series, line_colour(index).light, 1.9))
            numbers += [step for step, _ in series]
    if not numbers:
        return None
    number_steps(figure, min(numbers), max(numbers), words("axis.step"))
    return Chart("sources", words("sources.title"), words("sources.caption"), figure, 270, True)
