"""Every rank in every step as a heat map: how busy it was, and what its stages took."""

from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from paceline.report.palette import heat_scale
from paceline.report.theme import Chart, Variant, chart_of_variants, new_figure, number_steps
from paceline.report.words import Words
from paceline.telemetry.records import SectionRecord

_MAX_COLUMNS = 200
"""More steps than this are averaged in equal runs of consecutive ones; ranks are never put together."""

_GIB = 2**30

Matrix = NDArray[np.float64]

_FORMATS: Mapping[str, str] = {
    "busy": ".4~p",
    "idle": ".3~s",
    "update": ".3~s",
    "rollout": ".3~s",
    "tokens": ",.0f",
    "memory": ".2f",
}
"""Figures of a step, each with a label `heat.KEY`, and how their numbers are written."""


def step_figures(step: SectionRecord) -> tuple[float, ...]:
    """The figures of `_FORMATS` in their order: busy share, seconds idle, of actor update and rollout, tokens
    of the update, peak memory in GiB (of the device, on a CPU of the process)."""
    idle, rollout, update = (step.stages.get(name) for name in ("idle", "rollout", "update_actor"))
    idle_s = idle.self_s if idle else 0.0
    return (
        (step.wall_s - idle_s - step.unaccounted_s) / step.wall_s,
        idle_s,
        update.self_s if update else 0.0,
        rollout.self_s if rollout else 0.0,
        update.tokens if update else 0.0,
        (step.peak_allocated or step.host_rss) / _GIB,
    )


def utilisation_heatmap(rank_steps: Mapping[int, Sequence[SectionRecord]], words: Words) -> Chart | None:
    """Ranks by steps, one figure at a time; None for a single rank."""
    numbers = sorted({step.step for found in rank_steps.values() for step in found if step.step is not None})
    if len(rank_steps) < 2 or not numbers:
        return None
    size = -(-len(numbers) // _MAX_COLUMNS)
    columns = {number: index // size for index, number in enumerate(numbers)}
    middles = [sum(run) / len(run) for run in _runs(numbers, size)]
    matrices = [_binned(found, columns, len(middles)) for found in rank_steps.values()]
    variants = []
    for index, (key, form) in enumerate(_FORMATS.items()):
        rows = np.stack([matrix[index] for matrix in matrices])
        if np.any(np.nan_to_num(rows)):
            variants.append(_variant(key, form, list(rank_steps), middles, rows, words))
    caption = words.sentences(words("heat.caption"), words("heat.binned", count=size) if size > 1 else "")
    return chart_of_variants("utilisation", words("heat.title"), caption, variants)


def _runs(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def _binned(found: Sequence[SectionRecord], columns: Mapping[int, int], num_columns: int) -> Matrix:
    """A rank's figures by column, the mean of its steps there; nan where it has none."""
    steps = [step for step in found if step.step is not None and step.wall_s > 0]
    at = np.array([columns[step.step] for step in steps if step.step is not None], dtype=np.int64)
    counts = np.bincount(at, minlength=num_columns)
    figures = np.array([step_figures(step) for step in steps]).reshape(len(steps), len(_FORMATS))
    with np.errstate(invalid="ignore"):  # no step in a column: nan, which is drawn as a gap
        return np.stack([np.bincount(at, row, num_columns) / counts for row in figures.T])


def _variant(
    key: str,
    form: str,
    ranks: Sequence[int],
    middles: Sequence[float],
    rows: Matrix,
    words: Words,
) -> Variant:
    figure = new_figure(margin={"r": 12})
    unit = words(f"heat.unit-{key}")
    figure.add_trace(
        go.Heatmap(
            z=rows.astype(np.float32),
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
