"""What the model learns and how healthy the updates are: small charts over steps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from paceline.report import formats
from paceline.report.intervals import wilson_interval
from paceline.report.palette import ACCENT, FAINT, REFERENCE, SECOND
from paceline.report.run_data import RunData
from paceline.report.theme import Chart, new_figure, number_steps
from paceline.report.words import Words

_SMOOTHED_FROM = 12
"""Fewer points than this are drawn as they are."""


@dataclass(frozen=True, slots=True)
class _Small:
    """A small chart: up to two metrics with the keys of their labels, drawn against the step."""

    key: str
    lines: tuple[tuple[str, str], ...]
    is_share: bool = False
    from_zero: bool = False
    unit: str = ""


SMALL_CHARTS = (
    _Small("length", (("response_length/mean", "mean"), ("response_length/max", "longest")), unit="tokens"),
    _Small("truncated", (("truncated_fraction", "truncated"),), is_share=True, from_zero=True),
    _Small("entropy", (("entropy", "entropy"),), unit="nats"),
    _Small("kl", (("kl/reference", "reference"), ("kl/old", "old")), unit="nats"),
    _Small("ratio", (("ratio/mean", "mean"), ("ratio/max", "largest"))),
    _Small(
        "clip",
        (("clip_fraction", "ratio-clipped"), ("kl/capped_fraction", "kl-capped")),
        is_share=True,
        from_zero=True,
    ),
    _Small("grad", (("grad_norm", "before-clipping"),)),
    _Small("values", (("values/mean", "values"), ("returns/mean", "returns")), unit="score"),
    _Small("explained-variance", (("critic/explained_variance", "explained"),)),
    _Small("critic-loss", (("critic/loss", "loss"),)),
    _Small("critic-clip", (("critic/clip_fraction", "held"),), is_share=True, from_zero=True),
    _Small("critic-grad", (("critic/grad_norm", "before-clipping"),)),
    _Small("effective", (("tokens/effective_share", "effective"),)),
    _Small(
        "logprob-difference",
        (("rollout/logprob_difference_mean", "mean"), ("rollout/logprob_difference_max", "largest")),
        unit="nats",
    ),
    _Small(
        "throughput",
        (("throughput/tokens_per_s", "whole-step"), ("throughput/generated_tokens_per_s", "generation")),
        unit="tokens-per-s",
    ),
    _Small("loss", (("loss/policy", "loss"),)),
    _Small("lr", (("lr", "rate"), ("critic/lr", "critic"))),
)
"""Titles are the texts `small.KEY`, labels `line.KEY`, units `axis.KEY`."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A metric that had one value in every step; said in a line instead of drawn."""

    name: str
    value: str


def reward_chart(run: RunData, words: Words) -> Chart | None:
    """Mean reward of every step, with a running mean through it."""
    series = run.series("reward/mean")
    if not any(math.isfinite(value) for _, value in series):
        return None
    figure = new_figure(hovermode="x unified", showlegend=len(series) >= _SMOOTHED_FROM)
    window = max(3, len(series) // 10)
    if len(series) >= _SMOOTHED_FROM:
        figure.add_trace(line_of(words("reward.each"), series, FAINT.light, 1.4))
        figure.add_trace(
            line_of(words("reward.smoothed", count=window), running_mean(series, window), ACCENT.light, 2.4)
        )
    else:
        figure.add_trace(line_of(words("reward.line"), series, ACCENT.light, 2.2))
    number_steps(figure, series[0][0], series[-1][0], words("axis.step"))
    return Chart("reward", words("reward.title"), words("reward.caption"), figure, height=270, zooms=True)


def accuracy_chart(run: RunData, figures: Mapping[str, Any], words: Words) -> Chart | None:
    """Held-out accuracy with 95 % intervals, the best constant answer, and accuracy on the training samples."""
    held_out = [(step, value) for step, value in run.series("eval/accuracy") if 0.0 <= value <= 1.0]
    training = run.series("accuracy/train")
    if not held_out:
        return None
    figure = new_figure(hovermode="x unified", showlegend=True)
    if any(math.isfinite(value) for _, value in training):
        figure.add_trace(line_of(words("accuracy.training"), training, FAINT.light, 1.4, share=True))
    steps = [step for step, _ in (*training, *held_out)]
    constant = figures["accuracy_constant"]
    if constant is not None:
        level = [(min(steps), constant), (max(steps), constant)]
        line = line_of(words("accuracy.constant"), level, REFERENCE.light, 1.6, share=True)
        line.line.dash, line.mode = "dash", "lines"
        figure.add_trace(line)
    figure.add_trace(_held_out(words("accuracy.held-out"), held_out, figures["num_eval_prompts"]))
    number_steps(figure, min(steps), max(steps), words("axis.step"))
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return Chart(
        "accuracy", words("accuracy.title"), words("accuracy.caption"), figure, height=270, zooms=True
    )


def _held_out(label: str, points: Sequence[tuple[int, float]], num_prompts: int | None) -> go.Scatter:
    bounds = [wilson_interval(value, num_prompts) if num_prompts else (value, value) for _, value in points]
    return go.Scatter(
        name=label,
        x=[step for step, _ in points],
        y=[value for _, value in points],
        mode="lines+markers",
        line={"color": ACCENT.light, "width": 2.4},
        marker={"size": 9, "color": ACCENT.light},
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [high - value for (_, value), (_, high) in zip(points, bounds, strict=True)],
            "arrayminus": [value - low for (_, value), (low, _) in zip(points, bounds, strict=True)],
            "thickness": 1.4,
            "width": 5,
            "color": ACCENT.light,
        },
        customdata=[
            f"{formats.share(v)} ({formats.points(*b)})" for (_, v), b in zip(points, bounds, strict=True)
        ],
        hovertemplate="%{customdata}",
    )


def small_charts(run: RunData, words: Words) -> tuple[list[Chart], list[Constant]]:
    """The small charts that have something to show, and the metrics that never changed."""
    charts, constants = [], []
    for spec in SMALL_CHARTS:
        found = [
            (name, label, series) for name, label in spec.lines if (series := _finite_somewhere(run, name))
        ]
        moving = [line for line in found if not _is_constant(line[2])]
        if moving:
            charts.append(_small_chart(spec, found, words))
        else:
            constants += [Constant(name, _value(series[0][1], spec.is_share)) for name, _, series in found]
    return charts, constants


def _finite_somewhere(run: RunData, name: str) -> list[tuple[int, float]]:
    series = run.series(name)
    return series if any(math.isfinite(value) for _, value in series) else []


def _is_constant(series: Sequence[tuple[int, float]]) -> bool:
    return len(series) > 1 and all(value == series[0][1] for _, value in series)


def _value(value: float, is_share: bool) -> str:
    return formats.share(value) if is_share else formats.number(value)


def _small_chart(
    spec: _Small, found: Sequence[tuple[str, str, list[tuple[int, float]]]], words: Words
) -> Chart:
    figure = new_figure(hovermode="x unified", showlegend=len(found) > 1)
    colours = (ACCENT.light, SECOND.light)
    for (_, label, series), colour in zip(found, colours, strict=False):
        figure.add_trace(line_of(words(f"line.{label}"), series, colour, 1.8, share=spec.is_share))
    if spec.is_share:
        figure.update_yaxes(tickformat=".0%")
    if spec.from_zero:
        figure.update_yaxes(rangemode="tozero")
    if spec.unit:
        figure.update_yaxes(title_text=words(f"axis.{spec.unit}"))
    numbers = [step for _, _, series in found for step, _ in series]
    number_steps(figure, min(numbers), max(numbers), title="")
    caption = words.metric(found[0][0])
    return Chart(f"metric-{spec.key}", words(f"small.{spec.key}"), caption, figure, height=190)


def running_mean(series: Sequence[tuple[int, float]], window: int) -> list[tuple[int, float]]:
    """Mean of up to `window` points centred on each; points that are not finite are left out."""
    half = window // 2
    smoothed = []
    for index, (step, _) in enumerate(series):
        near = [v for _, v in series[max(0, index - half) : index + half + 1] if math.isfinite(v)]
        smoothed.append((step, sum(near) / len(near) if near else math.nan))
    return smoothed


def line_of(
    label: str, series: Sequence[tuple[int, float]], colour: str, width: float, share: bool = False
) -> go.Scatter:
    """A metric over steps; values that are not finite leave a gap."""
    num_finite = sum(math.isfinite(value) for _, value in series)
    return go.Scatter(
        name=label,
        x=[step for step, _ in series],
        y=[value if math.isfinite(value) else None for _, value in series],
        mode="lines" if num_finite > 2 else "lines+markers",
        line={"color": colour, "width": width},
        customdata=[_value(value, share) for _, value in series],
        hovertemplate="%{customdata}",
    )
