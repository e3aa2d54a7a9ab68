"""What devices and hosts did in profiled steps: every stage's seconds divided into the six causes."""

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from paceline.report import formats
from paceline.report.blocks import Cell, Column, Row, Table
from paceline.report.palette import CAUSE_COLOURS, ordered
from paceline.report.theme import Chart, LegendPart, Variant, chart_of_variants, new_figure, number_steps
from paceline.report.words import Words
from paceline.telemetry.causes.records import RankCauses, StepCauses
from paceline.types import CAUSES, Cause

StageCells = Mapping[str, Mapping[Cause, float]]
"""Seconds by stage and cause."""

_MAX_KERNELS = 12
_MAX_NAME = 90
_MAX_STAGE_VARIANTS = 5


def causes_by_stage(ranks: Sequence[RankCauses], words: Words) -> Chart | None:
    """Seconds per step of every stage by cause, mean over profiled steps and ranks; None where none was profiled."""
    steps = [step for rank in ranks for step in rank.steps]
    if not steps:
        return None
    cells = mean_cells(steps)
    names = [name for name in ordered(set(cells)) if sum(cells[name].values()) > 0][::-1]
    figure = new_figure(barmode="stack", bargap=0.28)
    for cause in CAUSES:
        values = [cells[name][cause] for name in names]
        if any(values):
            figure.add_trace(_bars(words, cause, [words.stage(name) for name in names], values))
    figure.update_xaxes(title_text=words("axis.seconds"), showgrid=True)
    figure.update_yaxes(showgrid=False)
    caption = words.sentences(
        words("causes.by-stage-caption", steps=words.number_of("step", _num_steps(ranks))),
        words("causes.operators") if steps[0].basis == "operators" else "",
    )
    height = 70 + 27 * max(2, len(names))
    return Chart("causes-stages", words("causes.by-stage"), caption, figure, height, legend=legend(words))


def mean_cells(steps: Sequence[StepCauses]) -> dict[str, dict[Cause, float]]:
    """Mean seconds per step by stage and cause."""
    names = dict.fromkeys(name for step in steps for name in step.cells)
    return {
        name: {
            cause: sum(step.cells[name][cause] for step in steps if name in step.cells) / len(steps)
            for cause in CAUSES
        }
        for name in names
    }


def legend(words: Words) -> tuple[LegendPart, ...]:
    """The six causes with their colours."""
    return tuple(LegendPart(f"var(--cause-{cause})", words.cause(cause)) for cause in CAUSES)


def _num_steps(ranks: Sequence[RankCauses]) -> int:
    return len({step.step for rank in ranks for step in rank.steps})


def _bars(words: Words, cause: Cause, names: list[str], values: list[float]) -> go.Bar:
    return go.Bar(
        name=words.cause(cause),
        orientation="h",
        x=values,
        y=names,
        marker={"color": CAUSE_COLOURS[cause].light, "line": {"width": 0}},
        customdata=[formats.seconds(value) for value in values],
        hovertemplate="%{y}: %{customdata}<extra>" + words.cause(cause) + "</extra>",
    )


def causes_by_step(ranks: Sequence[RankCauses], words: Words) -> Chart | None:
    """Every profiled step by cause, of the whole step and, behind buttons, of its longest stages."""
    by_step: dict[int, list[StepCauses]] = {}
    for rank in ranks:
        for step in rank.steps:
            by_step.setdefault(step.step, []).append(step)
    if len(by_step) < 2:
        return None
    cells = {step: mean_cells(found) for step, found in sorted(by_step.items())}
    totals = mean_cells([step for rank in ranks for step in rank.steps])
    longest = sorted(totals, key=lambda name: -sum(totals[name].values()))[:_MAX_STAGE_VARIANTS]
    variants = [_step_variant(cells, None, words("causes.whole-step"), words)]
    variants += [_step_variant(cells, name, words.stage(name), words) for name in longest]
    return chart_of_variants(
        "causes-steps", words("causes.by-step"), words("causes.by-step-caption"), variants, legend(words)
    )


def _step_variant(cells: Mapping[int, StageCells], stage: str | None, label: str, words: Words) -> Variant:
    figure = new_figure(barmode="stack", hovermode="x unified")
    numbers = list(cells)
    for cause in CAUSES:
        values = [
            sum(found[cause] for name, found in stages.items() if stage in (None, name))
            for stages in cells.values()
        ]
        if any(values):
            figure.add_trace(
                go.Bar(
                    name=words.cause(cause),
                    x=[str(number) for number in numbers],
                    y=values,
                    marker={"color": CAUSE_COLOURS[cause].light, "line": {"width": 0}},
                    customdata=[formats.seconds(value) for value in values],
                    hovertemplate="%{customdata}",
                )
            )
    number_steps(figure, 0, len(numbers) + 10, words("axis.step"))
    figure.update_xaxes(type="category")
    figure.update_yaxes(title_text=words("axis.seconds"), rangemode="tozero")
    return Variant(label, figure, 260)


def kernel_table(ranks: Sequence[RankCauses], words: Words) -> Table | None:
    """The kernels (on a CPU the operators) that took most, and those that no pattern knows; None without any."""
    totals: dict[tuple[str, str, str, bool], list[float]] = {}
    steps = [step for rank in ranks for step in rank.steps]
    for step in steps:
        for kernel in step.kernels:
            found = totals.setdefault((kernel.name, kernel.cell, kernel.library, kernel.is_known), [0.0, 0.0])
            found[0] += kernel.total_s
            found[1] += kernel.count
    if not totals:
        return None
    longest = sorted(totals.items(), key=lambda item: -item[1][0])
    unknown = [item for item in longest if not item[0][3]]
    rows = [_kernel_row(item, len(steps), words) for item in longest[:_MAX_KERNELS]]
    seconds = sum(found[0] for _, found in unknown) / len(steps)
    note = words("causes.unknown", count=len(unknown), time=formats.seconds(seconds)) if unknown else ""
    names = ("kernel", "cause", "library", "calls", "seconds")
    columns = [Column(words(f"causes.{name}"), is_text=name in names[:3]) for name in names]
    title = words("causes.operators-title" if steps[0].basis == "operators" else "causes.kernels-title")
    return Table(title, words.sentences(words("causes.kernels-caption"), note), columns, rows, folded=True)


def _kernel_row(item: tuple[tuple[str, str, str, bool], list[float]], num_steps: int, words: Words) -> Row:
    (name, cell, library, is_known), (seconds, count) = item
    shown = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]} ..."
    return Row(
        [
            Cell(shown, is_code=True),
            Cell(words.cause(cell)),
            Cell(library if is_known else words("causes.not-known"), tone="" if is_known else "bad"),
            Cell(formats.count(count / num_steps)),
            Cell(formats.seconds(seconds / num_steps)),
        ]
    )
