"""How long samples are, and how evenly their tokens lie on the ranks."""

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from paceline.report import formats
from paceline.report.charts_learning import line_of
from paceline.report.palette import ACCENT, FAINT, REFERENCE, SECOND
from paceline.report.run_data import RunData, SampleFile
from paceline.report.theme import Chart, new_figure, number_steps
from paceline.report.words import Words

_MAX_CLASSES = 40


def length_chart(files: Sequence[SampleFile], words: Words) -> Chart | None:
    """Response lengths of the first and the last recorded step as shares of samples; None without lengths."""
    found = [(file.step, lengths_of(file)) for file in files]
    found = [(step, lengths) for step, lengths in found if lengths]
    if not found:
        return None
    longest = max(max(lengths) for _, lengths in found)
    width = class_width(longest)
    figure = new_figure(barmode="overlay", bargap=0.06, showlegend=len(found) > 1, hovermode="x unified")
    for (step, lengths), colour in zip(found, (SECOND, ACCENT)[-len(found) :], strict=False):
        figure.add_trace(_histogram(words("step.one", first=step), lengths, width, colour.light))
    figure.update_xaxes(title_text=words("axis.tokens"), range=[0, longest + width])
    figure.update_yaxes(tickformat=".0%")
    caption = words.sentences(
        words("lengths.caption"), *(_said(step, lengths, words) for step, lengths in found)
    )
    return Chart("lengths", words("lengths.title"), caption, figure, 250, True)


def lengths_of(file: SampleFile) -> list[int]:
    """Response lengths in tokens, of the samples that have one."""
    values = (row.get("num_tokens") for row in file.rows)
    return [value for value in values if isinstance(value, int) and not isinstance(value, bool)]


def class_width(longest: int) -> int:
    """Tokens per class of a histogram: 1, 2 or 5 times a power of ten, for at most 40 classes."""
    wanted = max(1, -(-(longest + 1) // _MAX_CLASSES))
    power = 10 ** math.floor(math.log10(wanted))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= wanted)


def histogram(lengths: Sequence[int], width: int) -> dict[int, float]:
    """Share of samples by the first length of their class."""
    counts: dict[int, int] = {}
    for length in lengths:
        start = length // width * width
        counts[start] = counts.get(start, 0) + 1
    return {start: counts[start] / len(lengths) for start in sorted(counts)}


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _histogram(name: str, lengths: Sequence[int], width: int, colour: str) -> go.Bar:
    classes = histogram(lengths, width)
    return go.Bar(
        name=name,
        x=[start + width / 2 if width > 1 else start for start in classes],
        y=list(classes.values()),
        width=0.94 * width,
        opacity=0.62,
        marker={"color": colour, "line": {"width": 0}},
        customdata=[
            f"{formats.share(share)} ({start}–{start + width - 1})" if width > 1 else formats.share(share)
            for start, share in classes.items()
        ],
        hovertemplate="%{customdata}",
    )


def _said(step: int, lengths: Sequence[int], words: Words) -> str:
    return words(
        "lengths.quantiles",
        step=step,
        count=f"{len(lengths):,}",
        half=f"{quantile(lengths, 0.5):,}",
        most=f"{quantile(lengths, 0.9):,}",
        longest=f"{max(lengths):,}",
    )


def tokens_per_step(run: RunData, words: Words) -> Chart | None:
    """Prompt and response tokens of every step, and padding beside them; None where they were not counted."""
    parts = (
        ("tokens/prompt", "lengths.prompt", FAINT),
        ("tokens/response", "lengths.response", ACCENT),
        ("tokens/padding", "lengths.padding", REFERENCE),
    )
    found = [(key, colour, run.series(metric)) for metric, key, colour in parts]
    found = [(key, colour, series) for key, colour, series in found if any(value for _, value in series)]
    if not found:
        return None
    figure = new_figure(showlegend=len(found) > 1, hovermode="x unified")
    for key, colour, series in found:
        figure.add_trace(line_of(words(key), series, colour.light, 1.9))
    numbers = [step for _, _, series in found for step, _ in series]
    number_steps(figure, min(numbers), max(numbers), words("axis.step"))
    figure.update_yaxes(title_text=words("axis.tokens"), rangemode="tozero")
    return Chart("tokens", words("lengths.tokens"), words("lengths.tokens-caption"), figure, 250, True)


def tokens_per_rank(run: RunData, words: Words) -> Chart | None:
    """Tokens of the actor update on the least, the mean and the most loaded rank; None for one rank."""
    by_step: dict[int, list[int]] = {}
    for steps in run.rank_steps.values():
        for step in steps:
            stage = step.stages.get("update_actor")
            if step.step is not None and stage is not None and stage.tokens:
                by_step.setdefault(step.step, []).append(stage.tokens)
    if len(run.ledgers) < 2 or not by_step:
        return None
    lines: Mapping[str, list[tuple[int, float]]] = {
        "lengths.least": [(step, float(min(values))) for step, values in sorted(by_step.items())],
        "lengths.mean": [(step, sum(values) / len(values)) for step, values in sorted(by_step.items())],
        "lengths.most": [(step, float(max(values))) for step, values in sorted(by_step.items())],
    }
    figure = new_figure(showlegend=True, hovermode="x unified")
    for (key, series), colour in zip(lines.items(), (REFERENCE, ACCENT, SECOND), strict=True):
        figure.add_trace(line_of(words(key), series, colour.light, 1.8))
    number_steps(figure, min(by_step), max(by_step), words("axis.step"))
    figure.update_yaxes(title_text=words("axis.tokens"), rangemode="tozero")
    return Chart(
        "rank-tokens", words("lengths.per-rank"), words("lengths.per-rank-caption"), figure, 250, True
    )
