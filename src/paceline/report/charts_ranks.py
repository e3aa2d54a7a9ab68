"""Every rank in every step as a heat map: how busy it was, and what its stages took."""

from collections.abc import Callable, Mapping, Sequence

import plotly.graph_objects as go

from paceline.report.charts_time import stage_seconds
from paceline.report.palette import heat_scale
from paceline.report.theme import Chart, Variant, chart_of_variants, new_figure, number_steps
from paceline.report.words import Words
from paceline.telemetry.records import RankLedger, SectionRecord

_MAX_COLUMNS = 200
"""More steps than this are averaged in equal runs of consecutive ones; ranks are never put together."""

_GIB = 2**30

Figure = Callable[[SectionRecord], float]


def busy_share(step: SectionRecord) -> float:
    """Share of a step that a rank was neither idle nor in no span."""
    return (step.wall_s - stage_seconds(step, "idle") - step.unaccounted_s) / step.wall_s


def _stage(name: str) -> Figure:
    return lambda step: stage_seconds(step, name)


def _tokens(step: SectionRecord) -> float:
    stage = step.stages.get("update_actor")
    return float(stage.tokens) if stage is not None else 0.0


def _memory(step: SectionRecord) -> float:
    peak = max((stage.peak_allocated for stage in step.stages.values()), default=0)
    return (peak or max((stage.host_rss for stage in step.stages.values()), default=0)) / _GIB


_FIGURES: Mapping[str, tuple[Figure, str]] = {
    "busy": (busy_share, ".1%"),
    "idle": (_stage("idle"), ".3~s"),
    "update": (_stage("update_actor"), ".3~s"),
    "rollout": (_stage("rollout"), ".3~s"),
    "tokens": (_tokens, ",.0f"),
    "memory": (_memory, ".2f"),
}
"""Label key `heat.KEY` to the figure of a step and how its number is written."""


def utilisation_heatmap(ledgers: Sequence[RankLedger], words: Words) -> Chart | None:
    """Ranks by steps, one figure at a time; None for a single rank."""
    steps = {ledger.rank: ledger.steps() for ledger in ledgers}
    numbers = sorted({step.step for found in steps.values() for step in found if step.step is not None})
    if len(steps) < 2 or not numbers:
        return None
    size = -(-len(numbers) // _MAX_COLUMNS)
    columns = {number: index // size for index, number in enumerate(numbers)}
    middles = [sum(run) / len(run) for run in _runs(numbers, size)]
    variants = []
    for key, (figure_of, form) in _FIGURES.items():
        rows = [_row(found, columns, len(middles), figure_of) for found in steps.values()]
        if any(value for row in rows for value in row if value is not None):
            variants.append(_variant(key, form, list(steps), middles, rows, words))
    caption = words.sentences(
        words("heat.caption"), words("heat.binned", count=size) if size > 1 else ""
    )
    return chart_of_variants("utilisation", words("heat.title"), caption, variants)


def _runs(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def _row(
    found: Sequence[SectionRecord], columns: Mapping[int, int], num_columns: int, figure_of: Figure
) -> list[float | None]:
    sums, counts = [0.0] * num_columns, [0] * num_columns
    for step in found:
        if step.step is not None and step.wall_s > 0:
            column = columns[step.step]
            sums[column] += figure_of(step)
            counts[column] += 1
    return [
        float(f"{total / count:.4g}") if count else None for total, count in zip(sums, counts, strict=True)
    ]


def _variant(
    key: str,
    form: str,
    ranks: Sequence[int],
    middles: Sequence[float],
    rows: list[list[float | None]],
    words: Words,
) -> Variant:
    figure = new_figure(margin={"r": 12})
    unit = words(f"heat.unit-{key}")
    figure.add_trace(
        go.Heatmap(
            z=rows,
            x=list(middles),
            y=[str(rank) for rank in ranks],
            colorscale=heat_scale(),
            colorbar={"thickness": 11, "outlinewidth": 0, "tickformat": form, "ticksuffix": unit, "len": 1.0},
            xgap=1 if len(middles) <= 100 else 0,
            ygap=1,
            hovertemplate=words("heat.hover", value="%{z:" + form + "}" + unit, rank="%{y}", step="%{x}")
            + "<extra></extra>",
        )
    )
    number_steps(figure, middles[0], middles[-1], words("axis.step"))
    figure.update_yaxes(
        type="category", autorange="reversed", title_text=words("axis.rank"), showgrid=False, nticks=24
    )
    return Variant(words(f"heat.{key}"), figure, 90 + max(60, len(ranks) * (11 if len(ranks) > 16 else 22)))
