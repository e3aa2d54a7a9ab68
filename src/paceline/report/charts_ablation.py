"""An ablation's charts: ratios with their intervals, predictions against measurements, what each stage became."""

from collections.abc import Sequence

import plotly.graph_objects as go

from paceline.lab.results import AblationRow
from paceline.report import formats
from paceline.report.palette import ACCENT, INK, REFERENCE, SECOND, colour_of, ordered
from paceline.report.theme import Chart, LegendPart, new_figure
from paceline.report.words import Words


def ratio_chart(rows: Sequence[AblationRow], margin: float, words: Words) -> Chart | None:
    """Step time over the baseline's with its interval, one line per arm; None where nothing was paired."""
    shown = [row for row in rows if row.step_time is not None][::-1]
    if not shown:
        return None
    figure = new_figure(margin={"t": 12})
    figure.add_vrect(x0=1 - margin, x1=1 + margin, fillcolor=REFERENCE.light, opacity=0.16, line_width=0)
    figure.add_vline(x=1.0, line={"width": 1.4, "color": INK.light})
    for row in shown:
        figure.add_trace(_interval(row, words))
    figure.update_xaxes(title_text=words("ablation.ratio-axis"), showgrid=True)
    figure.update_yaxes(showgrid=False, type="category")
    caption = words("ablation.ratio-caption", margin=formats.share(margin, 0))
    height = 74 + 34 * max(2, len(shown))
    return Chart("ablation-ratio", words("ablation.ratio-title"), caption, figure, height)


def _interval(row: AblationRow, words: Words) -> go.Scatter:
    time = row.step_time
    assert time is not None
    colour = {"faster": colour_of("update_actor"), "slower": SECOND}.get(row.verdict, REFERENCE)
    has_interval = time.low is not None and time.high is not None
    text = words(
        "ablation.ratio-hover",
        name=row.name,
        ratio=f"{time.ratio:.3f}",
        interval=f"{time.low:.3f} – {time.high:.3f}" if has_interval else formats.UNKNOWN,
        verdict=words(f"ablation.{row.verdict}"),
    )
    return go.Scatter(
        x=[time.ratio],
        y=[row.name],
        mode="markers",
        marker={"size": 11, "color": colour.light},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [0.0 if time.high is None else time.high - time.ratio],
            "arrayminus": [0.0 if time.low is None else time.ratio - time.low],
            "color": colour.light,
            "thickness": 2,
            "width": 6,
        },
        hovertemplate=text + "<extra></extra>",
    )


def prediction_chart(rows: Sequence[AblationRow], words: Words) -> Chart | None:
    """Seconds saved per step, predicted and measured, with intervals; None where nothing was predicted."""
    shown = [row for row in rows if row.predicted is not None and row.saved_s is not None][::-1]
    if not shown:
        return None
    figure = new_figure(showlegend=True, margin={"t": 26}, scattermode="group", scattergap=0.6)
    names = [row.name for row in shown]
    predicted = [row.predicted for row in shown if row.predicted is not None]
    measured = [row.saved_s for row in shown if row.saved_s is not None]
    bounds = (
        (
            "ablation.predicted",
            SECOND,
            [(one.saved_s, one.low_s, one.high_s) for one in predicted],
        ),
        (
            "ablation.measured",
            ACCENT,
            [
                (
                    one.mean,
                    one.mean if one.low is None else one.low,
                    one.mean if one.high is None else one.high,
                )
                for one in measured
            ],
        ),
    )
    for key, colour, values in bounds:
        figure.add_trace(
            go.Scatter(
                name=words(key),
                x=[mid for mid, _, _ in values],
                y=names,
                mode="markers",
                orientation="h",
                marker={"size": 10, "color": colour.light},
                error_x={
                    "type": "data",
                    "symmetric": False,
                    "array": [max(0.0, high - mid) for mid, _, high in values],
                    "arrayminus": [max(0.0, mid - low) for mid, low, _ in values],
                    "color": colour.light,
                    "thickness": 1.8,
                    "width": 5,
                },
                customdata=[formats.seconds(mid) for mid, _, _ in values],
                hovertemplate="%{y}: %{customdata}<extra>" + words(key) + "</extra>",
            )
        )
    figure.add_vline(x=0.0, line={"width": 1.2, "color": INK.light})
    figure.update_xaxes(title_text=words("ablation.saved-axis"), showgrid=True)
    figure.update_yaxes(showgrid=False, type="category")
    height = 90 + 40 * max(2, len(shown))
    return Chart(
        "ablation-prediction",
        words("ablation.prediction-title"),
        words("ablation.prediction-caption"),
        figure,
        height,
    )


def stage_chart(rows: Sequence[AblationRow], words: Words) -> Chart | None:
    """What each stage gained or lost per step in every arm, stacked; None where no stage was paired."""
    shown = [row for row in rows if row.stages][::-1]
    if not shown:
        return None
    figure = new_figure(barmode="relative", bargap=0.35)
    stages = ordered({stage for row in shown for stage in row.stages})
    drawn = []
    for stage in stages:
        values = [row.stages[stage].difference_s.mean if stage in row.stages else 0.0 for row in shown]
        if not any(values):
            continue
        drawn.append(LegendPart(f"var(--stage-{stage})", words.stage(stage)))
        figure.add_trace(
            go.Bar(
                name=words.stage(stage),
                orientation="h",
                x=values,
                y=[row.name for row in shown],
                marker={"color": colour_of(stage).light, "line": {"width": 0}},
                customdata=[f"{'+' if value > 0 else '−'}{formats.seconds(abs(value))}" for value in values],
                hovertemplate="%{y}: %{customdata}<extra>" + words.stage(stage) + "</extra>",
            )
        )
    figure.add_vline(x=0.0, line={"width": 1.2, "color": INK.light})
    figure.update_xaxes(title_text=words("ablation.stage-axis"), showgrid=True)
    figure.update_yaxes(showgrid=False, type="category")
    height = 74 + 34 * max(2, len(shown))
    return Chart(
        "ablation-stages",
        words("ablation.stage-title"),
        words("ablation.stage-caption"),
        figure,
        height,
        legend=tuple(drawn),
    )
