"""What a supervised run learns: loss and perplexity over steps."""

import math

from paceline.report.charts_learning import line_of, running_mean
from paceline.report.palette import ACCENT, FAINT, SECOND
from paceline.report.run_data import RunData
from paceline.report.theme import Chart, new_figure, number_steps

_SMOOTHED_FROM = 12
"""Fewer points than this are drawn as they are."""


def loss_chart(run: RunData) -> Chart | None:
    """Loss of every update, a running mean through it, and the held-out loss where it was measured."""
    training, held_out = run.series("loss/total"), run.series("eval/loss")
    if not any(math.isfinite(value) for _, value in (*training, *held_out)):
        return None
    figure = new_figure(hovermode="x unified", showlegend=True)
    if len(training) >= _SMOOTHED_FROM:
        window = max(3, len(training) // 10)
        figure.add_trace(line_of("each update", training, FAINT.light, 1.4))
        figure.add_trace(
            line_of(f"mean of {window} updates", running_mean(training, window), ACCENT.light, 2.4)
        )
    elif training:
        figure.add_trace(line_of("each update", training, ACCENT.light, 2.2))
    if held_out:
        figure.add_trace(line_of("held-out rows", held_out, SECOND.light, 2.4))
        figure.data[-1].mode = "lines+markers"
    steps = [step for step, _ in (*training, *held_out)]
    number_steps(figure, min(steps), max(steps))
    figure.update_yaxes(title_text="nats")
    caption = "Mean negative log-likelihood per learned token. Held-out rows are the same each time and not trained on."
    return Chart("loss", "Loss", caption, figure, height=270, zooms=True)


def perplexity_chart(run: RunData) -> Chart | None:
    """Held-out perplexity, on a logarithmic axis: equal steps are equal factors."""
    series = run.series("eval/perplexity")
    if not any(math.isfinite(value) for _, value in series):
        return None
    figure = new_figure(hovermode="x unified")
    figure.add_trace(line_of("held-out rows", series, ACCENT.light, 2.4))
    figure.data[-1].mode = "lines+markers"
    number_steps(figure, series[0][0], series[-1][0])
    figure.update_yaxes(type="log")
    caption = "exp of the held-out loss: among how many equally likely tokens the model in effect chooses."
    return Chart("perplexity", "Held-out perplexity", caption, figure, height=270, zooms=True)
