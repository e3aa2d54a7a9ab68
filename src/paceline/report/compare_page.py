"""The page that compares two runs."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.diagnosis import Diagnosis, diagnose
from paceline.diagnosis import wording as said
from paceline.report import formats
from paceline.report.blocks import Block, Cell, Column, Fact, Lines, Page, Row, Table, Tone, charts, section
from paceline.report.charts_compare import metric_over_steps, stages_side_by_side, step_times
from paceline.report.comparison import STEP, Change, SettingChange, setting_changes, stage_changes
from paceline.report.figures import figures_of
from paceline.report.page import written_line
from paceline.report.palette import stage_variable
from paceline.report.run_data import RunData
from paceline.report.tiles import Tile
from paceline.report.words import Words

Figures = Mapping[str, Any]

_SAME_WANTED = ("model.path", "task.name", "task.path")
"""Settings without which two runs do not do the same work."""


def build_comparison(first: RunData, second: RunData, words: Words) -> Page:
    """Turns two runs' records into the page's content; differences are second minus first."""
    one, two = figures_of(first), figures_of(second)
    names = run_names(first, second, one, two)
    changes = stage_changes(first, second) if first.steps and second.steps else []
    settings = setting_changes(first.config, second.config)
    return Page(
        kind=words("compare.kind"),
        title=words("compare.title", first=names[0], second=names[1]),
        status="",
        status_class="",
        facts=[
            Fact(words("compare.first"), f"{names[0]} ({words.number_of('step', one['num_steps'])})"),
            Fact(words("compare.second"), f"{names[1]} ({words.number_of('step', two['num_steps'])})"),
        ],
        sentences=_sentences(changes, settings, names, words),
        tiles=_tiles(one, two, words),
        sections=[
            *section("time", words("section.time"), _time(first, second, changes, names, words)),
            *section("waits", words("compare.waits"), _waits(first, second, names, words)),
            *section("figures", words("compare.figures"), [_figure_table(one, two, names, words)]),
            *section("learning", words("section.learning"), _learning(first, second, names, words)),
            *section("changed", words("compare.changed"), _changed(first, second, settings, names, words)),
        ],
        footer=written_line(second, words),
    )


def run_names(first: RunData, second: RunData, one: Figures, two: Figures) -> tuple[str, str]:
    """The runs' names; folders beside them where they are the same."""
    names = str(one["run"]), str(two["run"])
    if names[0] != names[1]:
        return names
    folders = [run.run_dir.resolve() for run in (first, second)]
    shown = [path.name for path in folders]
    if shown[0] == shown[1]:
        shown = [str(Path(path.parent.name) / path.name) for path in folders]
    return shown[0], shown[1]


def _sentences(
    changes: list[Change], settings: list[SettingChange], names: tuple[str, str], words: Words
) -> list[str]:
    if not changes:
        return [words("compare.no-steps")]
    step, stages = changes[0], changes[1:]
    key = "same" if not step.is_beyond_chance else "faster" if step.difference_s < 0 else "slower"
    found = [
        words(
            f"compare.{key}",
            first=names[0],
            second=names[1],
            before=formats.seconds(step.first_s),
            after=formats.seconds(step.second_s),
            share=formats.share(abs(step.difference_s) / step.first_s),
            interval=_interval(step),
        )
    ]
    moved = [change for change in stages if change.is_beyond_chance]
    if moved:
        most = max(moved, key=lambda change: abs(change.difference_s))
        found.append(
            words("compare.largest", stage=words.stage(most.stage), difference=_signed(most.difference_s))
        )
    names_changed = [change.name for change in settings]
    if any(name in names_changed for name in _SAME_WANTED):
        found.append(words("compare.other-work"))
    return found


def _interval(change: Change) -> str:
    if change.low is None or change.high is None:
        return formats.UNKNOWN
    return f"{_signed(change.low)} – {_signed(change.high)}"


def _signed(seconds: float) -> str:
    sign = "+" if seconds > 0 else "−" if seconds < 0 else ""
    return f"{sign}{formats.seconds(abs(seconds))}"


def _tiles(one: Figures, two: Figures, words: Words) -> list[Tile]:
    return [
        _tile(key, one.get(key), two.get(key), form, words)
        for key, form in _TILES
        if one.get(key) is not None or two.get(key) is not None
    ]


def _tile(
    key: str, first: float | None, second: float | None, form: Callable[[float | None], str], words: Words
) -> Tile:
    note = _changed_by(first, second, form, words) or words("compare.unknown")
    return Tile(
        words(f"compare.{key}"),
        f"{form(first)} → {form(second)}",
        note,
        wide=key in ("step_time_s", "tokens_per_s"),
    )


def _changed_by(
    first: float | None, second: float | None, form: Callable[[float | None], str], words: Words
) -> str:
    """The change of a figure; of a share in points, for a share of a share is easily misread. Empty where unknown."""
    if first is None or second is None:
        return ""
    if form is formats.share:
        return words("compare.points", change=f"{(second - first) * 100:+.1f}".replace("-", "−"))
    return words("compare.by", change=formats.change(first, second)) if first > 0 else ""


_TILES: tuple[tuple[str, Callable[[float | None], str]], ...] = (
    ("step_time_s", formats.seconds),
    ("tokens_per_s", formats.quantity),
    ("update_actor_share", formats.share),
    ("mfu", formats.share),
    ("reward_last", formats.number),
)
_FIGURES: tuple[tuple[str, Callable[[float | None], str]], ...] = (
    *_TILES,
    ("step_time_median_s", formats.seconds),
    ("generated_tokens_per_s", formats.quantity),
    ("tflops_update_actor", formats.number),
    ("mfu_step", formats.share),
    ("effective_token_share", formats.number),
    ("unaccounted_s", formats.seconds),
    ("device_allocated", formats.memory),
    ("device_reserved", formats.memory),
    ("host_rss", formats.memory),
    ("reward_first", formats.number),
    ("accuracy_before", formats.share),
    ("accuracy_after", formats.share),
    ("eval_loss_after", formats.number),
    ("num_ranks", lambda value: formats.UNKNOWN if value is None else formats.count(value)),
)
"""Figures of `report_figures` and how they are written; labels are the texts `compare.FIGURE`."""


def _figure_table(one: Figures, two: Figures, names: tuple[str, str], words: Words) -> Table:
    first, second = ({**figures, **figures["peak_memory"]} for figures in (one, two))
    columns = [
        Column(words("compare.figure"), is_text=True),
        Column(names[0]),
        Column(names[1]),
        Column(words("compare.change")),
    ]
    rows = []
    for key, form in _FIGURES:
        before, after = first.get(key), second.get(key)
        if before is None and after is None:
            continue
        moved = Cell(_changed_by(before, after, form, words))
        cells = [Cell(words(f"compare.{key}")), Cell(form(before)), Cell(form(after)), moved]
        rows.append(Row(cells))
    return Table("", words("compare.figures-caption"), columns, rows)


def _time(
    first: RunData, second: RunData, changes: list[Change], names: tuple[str, str], words: Words
) -> list[Block]:
    if not changes:
        return []
    by_stage = stages_side_by_side(changes, names, words)
    over_steps = step_times(first, second, names, by_stage.height if by_stage else 260, words)
    return [
        *charts([by_stage, over_steps], "pair"),
        _stage_table(changes, names, words),
    ]


def _stage_table(changes: list[Change], names: tuple[str, str], words: Words) -> Table:
    columns = [
        Column(words("stages.stage"), is_text=True),
        Column(names[0]),
        Column(names[1]),
        Column(words("compare.difference")),
        Column(words("compare.interval")),
        Column(words("compare.change")),
    ]
    rows = [_stage_row(change, words) for change in changes]
    return Table(
        words("compare.stage-table"), words("compare.stage-table-caption"), columns, rows[1:], rows[0]
    )


def _stage_row(change: Change, words: Words) -> Row:
    is_step = change.stage == STEP
    tone: Tone = "" if not change.is_beyond_chance else "good" if change.difference_s < 0 else "bad"
    share = formats.change(change.first_s, change.second_s, 0) if change.first_s else ""
    return Row(
        [
            Cell(words("stages.step"))
            if is_step
            else Cell(words.stage(change.stage), colour=stage_variable(change.stage)),
            Cell(formats.seconds(change.first_s)),
            Cell(formats.seconds(change.second_s)),
            Cell(_signed(change.difference_s), tone=tone),
            Cell(_interval(change), tone="muted"),
            Cell(share),
        ]
    )


def _waits(first: RunData, second: RunData, names: tuple[str, str], words: Words) -> list[Block]:
    found = [_diagnosed(run) for run in (first, second)]
    seconds = [{wait.kind: wait.seconds for wait in one.waits} if one else {} for one in found]
    kinds = list(dict.fromkeys((*seconds[0], *seconds[1])))
    if not kinds:
        return [Lines([words("compare.no-waits")])]
    columns = [
        Column(words("compare.wait"), is_text=True),
        Column(names[0]),
        Column(names[1]),
        Column(words("compare.difference")),
    ]
    rows = []
    for kind in kinds:
        before, after = seconds[0].get(kind, 0.0), seconds[1].get(kind, 0.0)
        cells = [
            Cell(said.wait_name(kind, words.lang)),
            Cell(formats.seconds(before)),
            Cell(formats.seconds(after)),
            Cell(_signed(after - before)),
        ]
        rows.append(Row(cells))
    return [Table("", words("compare.waits-caption"), columns, rows)]


def _diagnosed(run: RunData) -> Diagnosis | None:
    return diagnose(run.run_dir, run.ledgers, run.detailed_steps) if run.steps and run.config else None


def _learning(first: RunData, second: RunData, names: tuple[str, str], words: Words) -> list[Block]:
    wanted = (
        ("reward", "reward/mean"),
        ("throughput", "throughput/tokens_per_s"),
        ("length", "response_length/mean"),
        ("entropy", "entropy"),
        ("loss", "loss/total"),
    )
    return charts(
        [metric_over_steps(key, metric, first, second, names, words) for key, metric in wanted], "pair"
    )


def _changed(
    first: RunData, second: RunData, settings: list[SettingChange], names: tuple[str, str], words: Words
) -> list[Block]:
    environment = [
        change
        for change in setting_changes(first.environment, second.environment)
        if change.name.split(".")[0] not in ("host", "ceilings")
    ]
    return [
        _setting_table("compare.settings", settings, names, words),
        *([_setting_table("compare.environment", environment, names, words)] if environment else []),
    ]


def _setting_table(key: str, changes: list[SettingChange], names: tuple[str, str], words: Words) -> Table:
    columns = [
        Column(words("compare.setting"), is_text=True),
        Column(names[0], is_text=True),
        Column(names[1], is_text=True),
    ]
    rows = [
        Row([Cell(change.name, is_code=True), Cell(_shown(change.first)), Cell(_shown(change.second))])
        for change in changes
    ]
    return Table(
        words(key), words(f"{key}-caption") if rows else words("compare.none-changed"), columns, rows
    )


def _shown(value: Any) -> str:
    return formats.UNKNOWN if value is None else str(value)
