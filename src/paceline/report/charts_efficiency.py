"""How well the device was used: MFU against the time that steps waited."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from paceline.report import formats
from paceline.report.charts_time import stage_seconds
from paceline.report.intervals import Z_95
from paceline.report.palette import ACCENT, REFERENCE
from paceline.report.run_data import RunData
from paceline.report.stage_totals import peak_of
from paceline.report.theme import Chart, new_figure
from paceline.report.words import Words

WAITING_STAGES = ("idle", "reward", "data")
"""Stages in which training waits for something else; time in no span is added to them."""

_BESIDE_TRAINING = ("eval", "checkpoint")
"""Stages that some steps have and others have not; their time is taken out, so that steps can be compared."""

_FEWEST_STEPS = 6
_LITTLE_WAITING = 0.01
_MAX_POINTS = 2000


@dataclass(frozen=True, slots=True)
class StepPoint:
    """A step: share of its time that was waited, and MFU (TFLOP/s per device where no peak is known)."""

    step: int
    waiting: float
    rate: float


@dataclass(frozen=True, slots=True)
class Correlation:
    """Pearson's r of two figures with its 95 % interval (Fisher's z transformation)."""

    r: float
    low: float
    high: float
    num_points: int


def step_points(run: RunData) -> tuple[list[StepPoint], bool]:
    """Every step of all ranks together, and whether rates are MFU."""
    peak = peak_of(run)
    sums: dict[int, list[float]] = {}
    for steps in run.rank_steps.values():
        for step in steps:
            if step.step is None:
                continue
            found = sums.setdefault(step.step, [0.0, 0.0, 0.0])
            found[0] += step.wall_s - sum(stage_seconds(step, name) for name in _BESIDE_TRAINING)
            found[1] += step.unaccounted_s + sum(stage_seconds(step, name) for name in WAITING_STAGES)
            found[2] += sum(stage.flops for stage in step.stages.values())
    scale = 1e12 * (peak or 1.0)
    points = [
        StepPoint(step, waiting / wall, flops / wall / scale)
        for step, (wall, waiting, flops) in sorted(sums.items())
        if wall > 0 and flops > 0
    ]
    return points, peak is not None


def correlation(points: Sequence[tuple[float, float]]) -> Correlation | None:
    """Pearson's r; None with fewer than four points, or where one of the figures does not vary."""
    count = len(points)
    if count < 4:
        return None
    mean_x = math.fsum(x for x, _ in points) / count
    mean_y = math.fsum(y for _, y in points) / count
    var_x = math.fsum((x - mean_x) ** 2 for x, _ in points)
    var_y = math.fsum((y - mean_y) ** 2 for _, y in points)
    scale = math.sqrt(var_x * var_y)
    if scale <= 1e-15 * max(abs(mean_x * mean_y), 1e-300):
        return None
    r = math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / scale
    r = max(-1.0, min(1.0, r))
    if abs(r) == 1.0:
        return Correlation(r, r, r, count)
    z, half = math.atanh(r), Z_95 / math.sqrt(count - 3)
    return Correlation(r, math.tanh(z - half), math.tanh(z + half), count)


def mfu_against_waiting(run: RunData, words: Words) -> Chart | None:
    """One point per step; None where no FLOPs were recorded or there are too few steps."""
    points, is_mfu = step_points(run)
    if len(points) < _FEWEST_STEPS:
        return None
    found = correlation([(point.waiting, point.rate) for point in points])
    most = max(point.waiting for point in points)
    figure = new_figure()
    figure.add_trace(_scatter(points[:: -(-len(points) // _MAX_POINTS)], is_mfu, words))
    if found is not None and most >= _LITTLE_WAITING:
        figure.add_trace(_fit([(point.waiting, point.rate) for point in points], found))
    figure.update_xaxes(title_text=words("efficiency.waiting"), tickformat=".2~p", showgrid=True)
    figure.update_yaxes(
        title_text=words("efficiency.mfu" if is_mfu else "efficiency.tflops"),
        tickformat=".3~p" if is_mfu else ".3~g",
    )
    said = (
        words("efficiency.little", most=formats.share(most))
        if most < _LITTLE_WAITING
        else _said(found, words)
    )
    caption = words.sentences(words("efficiency.caption"), said)
    title = words("efficiency.title" if is_mfu else "efficiency.title-tflops")
    return Chart("efficiency", title, caption, figure, 280, True)


def _said(found: Correlation | None, words: Words) -> str:
    if found is None:
        return words("efficiency.no-correlation")
    key = "none" if found.low <= 0 <= found.high else "falls" if found.r < 0 else "rises"
    return words(
        f"efficiency.{key}",
        r=f"{found.r:.2f}",
        low=f"{found.low:.2f}",
        high=f"{found.high:.2f}",
        steps=words.number_of("step", found.num_points),
    )


def _scatter(points: Sequence[StepPoint], is_mfu: bool, words: Words) -> go.Scatter:
    rates = [formats.share(p.rate) if is_mfu else f"{formats.number(p.rate)} TFLOP/s" for p in points]
    texts = [
        words("efficiency.hover", step=point.step, waiting=formats.share(point.waiting), rate=rate)
        for point, rate in zip(points, rates, strict=True)
    ]
    return go.Scatter(
        x=[round(point.waiting, 6) for point in points],
        y=[float(f"{point.rate:.5g}") for point in points],
        mode="markers",
        marker={"size": 7, "color": ACCENT.light, "opacity": 0.75, "line": {"width": 0}},
        customdata=texts,
        hovertemplate="%{customdata}<extra></extra>",
    )


def _fit(points: Sequence[tuple[float, float]], found: Correlation) -> go.Scatter:
    """The least-squares line through the points."""
    count = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / count, sum(y for _, y in points) / count
    spread_x = math.sqrt(sum((x - mean_x) ** 2 for x, _ in points))
    spread_y = math.sqrt(sum((y - mean_y) ** 2 for _, y in points))
    slope = found.r * spread_y / spread_x
    ends = [min(x for x, _ in points), max(x for x, _ in points)]
    return go.Scatter(
        x=ends,
        y=[mean_y + slope * (x - mean_x) for x in ends],
        mode="lines",
        line={"color": REFERENCE.light, "width": 1.6, "dash": "dash"},
        hoverinfo="skip",
    )
