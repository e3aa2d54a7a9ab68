"""What a supervised run learns: loss and perplexity over steps."""

import math

from paceline.report.charts_learning import line_of, running_mean
from paceline.report.palette import ACCENT, FAINT, SECOND
from paceline.report.run_data import RunData
from paceline.report.theme import Chart, new_figure, number_steps
from paceline.report.words import Words

_SMOOTHED_FROM = 12
"""Fewer points than this are drawn as they are."""


def loss_chart(run: RunData, words: Words) -> Chart | None:
    """Loss of every update, a running mean through it, and the held-out loss where it was measured."""
    training, held_out = run.series("loss/total"), run.series("eval/loss")
    if not any(math.isfinite(value) for _, value in (*training, *held_out)):
        return None
    figure = new_figure(hovermode="x unified", showlegend=True)
    if len(training) >= _SMOOTHED_FROM:
        window = max(3, len(training) // 10)
        figure.add_trace(line_of(words("loss.each"), training, FAINT.light, 1.4))
        figure.add_trace(
            line_of(words("loss.smoothed", count=window), running_mean(training, window), ACCENT.light, 2.4)
        )
    elif training:
        figure.add_trace(line_of(words("loss.each"), training, ACCENT.light, 2.2))
    if held_out:
        figure.add_trace(line_of(words("loss.held-out"), held_out, SECOND.light, 2.4))
        figure.data[-1].mode = "lines+markers"
    steps = [step for step, _ in (*training, *held_out)]
    number_steps(figure, min(steps), max(steps), words("axis.step"))
    figure.update_yaxes(title_text=words("axis.nats"))
    caption = words("loss.caption")
    return Chart("loss", words("loss.title"), caption, figure, height=270, zooms=True)


def perplexity_chart(run: RunData, words: Words) -> Chart | None:
    """Held-out perplexity, on a logarithmic axis: equal steps are equal factors."""
    series = run.series("eval/perplexity")
    if not any(math.isfinite(value) for _, value in series):
        return None
    figure = new_figure(hovermode="x unified")
    figure.add_trace(line_of(words("loss.held-out"), series, ACCENT.light, 2.4))
    figure.data[-1].mode = "lines+markers"
    number_steps(figure, series[0][0], series[-1][0], words("axis.step"))
    figure.update_yaxes(type="log")
    caption = words("perplexity.caption")
    return Chart("perplexity", words("perplexity.title"), caption, figure, height=270, zooms=True)
