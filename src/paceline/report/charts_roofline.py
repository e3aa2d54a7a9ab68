"""Every stage against the machine's ceilings."""

import plotly.graph_objects as go

from paceline.report import formats
from paceline.report.palette import FAINT, INK, colour_of
from paceline.report.theme import Chart, new_figure
from paceline.report.words import Words
from paceline.telemetry.roofline import Roofline, StageRoofline


def roofline_chart(found: Roofline, words: Words) -> Chart | None:
    """Achieved TFLOP/s against arithmetic intensity, under the ceilings; None where a stage has no bytes or FLOPs, or
    the machine's ceilings are unknown."""
    stages = [stage for stage in found.stages if stage.intensity and stage.tflops]
    peak, bandwidth = found.peak_tflops, found.peak_gbs
    if not stages or peak is None or bandwidth is None:
        return None
    intensities = [stage.intensity for stage in stages if stage.intensity]
    ridge = peak * 1000 / bandwidth
    low, high = min([*intensities, ridge]) / 3, max([*intensities, ridge]) * 3
    figure = new_figure()
    roof = [(low, low * bandwidth / 1000), (ridge, peak), (high, peak)]
    figure.add_trace(
        go.Scatter(
            x=[x for x, _ in roof],
            y=[y for _, y in roof],
            mode="lines",
            line={"color": INK.light, "width": 1.6},
            hovertemplate=words("roofline.roof") + ": %{y:.3~g} TFLOP/s<extra></extra>",
        )
    )
    figure.add_vline(x=ridge, line={"width": 1, "dash": "dot", "color": FAINT.light})
    for stage in stages:
        figure.add_trace(_stage_point(stage, words))
    figure.update_xaxes(type="log", title_text=words("roofline.intensity"), showgrid=True)
    figure.update_yaxes(type="log", title_text="TFLOP/s")
    measured = found.ceilings is not None and found.ceilings.is_measured
    caption = words.sentences(
        words("roofline.caption"), words("roofline.measured" if measured else "roofline.data-sheet")
    )
    return Chart("roofline", words("roofline.title"), caption, figure, 280, True)


def _stage_point(stage: StageRoofline, words: Words) -> go.Scatter:
    name = words.stage(stage.stage)
    text = words(
        "roofline.hover",
        stage=name,
        rate=formats.number(stage.tflops),
        share=formats.share(stage.floor_share),
    )
    return go.Scatter(
        x=[stage.intensity],
        y=[stage.tflops],
        mode="markers+text",
        text=[name],
        textposition="top center",
        textfont={"size": 11},
        marker={"size": 11, "color": colour_of(stage.stage).light},
        hovertemplate=text + "<extra></extra>",
    )
