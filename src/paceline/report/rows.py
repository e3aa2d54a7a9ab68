"""Tables of the page: stages, ranks, counters."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.report import formats
from paceline.report.blocks import Cell, Column, Row, Strip, StripPart, Table
from paceline.report.counters import Counter
from paceline.report.palette import stage_variable
from paceline.report.stage_totals import RankRow, StageRow
from paceline.report.words import Words

_MAX_RANKS = 64
_FOLDED_FROM = 9


def strip(rows: Sequence[StageRow], words: Words) -> Strip:
    """The mean step as one bar."""
    parts = [
        StripPart(
            name=words.stage(row.stage),
            meaning=words.meaning(row.stage),
            colour=stage_variable(row.stage),
            width=row.share * 100,
            share=formats.share(row.share),
            hint=words(
                "strip.part",
                stage=words.stage(row.stage),
                time=formats.seconds(row.seconds),
                share=formats.share(row.share),
            ),
            is_pale=row.stage == "idle",
        )
        for row in rows
    ]
    return Strip(words("strip.title"), words("strip.label"), parts)


def stage_table(rows: Sequence[StageRow], figures: Mapping[str, Any], main_rank: int, words: Words) -> Table:
    """Means per step of every stage, and of the step."""
    names = ("time", "share", "tokens", "flops", "tokens-per-s", "tflops", "mfu")
    columns = [
        Column(words("stages.stage"), is_text=True),
        Column(words("stages.meaning"), is_text=True, hides=True),
        *(Column(words(f"stages.{name}")) for name in names),
    ]
    untimed = figures["num_untimed_steps"]
    warmup = figures["num_warmup_steps"]
    left_out = [words("stages.left-out", warmup=warmup, profiled=untimed - warmup)] if untimed else []
    caption = words.sentences(words("stages.caption", rank=main_rank), *left_out, _mfu_note(figures, words))
    body = [_stage_row(row, words) for row in rows]
    return Table(words("stages.title"), caption, columns, body, _step_row(rows, figures, words))


def _mfu_note(figures: Mapping[str, Any], words: Words) -> str:
    if figures["peak_tflops"] is None:
        return words("stages.no-peak")
    return words("stages.peak", peak=formats.number(figures["peak_tflops"]))


def _stage_row(row: StageRow, words: Words) -> Row:
    texts = (
        formats.seconds(row.seconds),
        formats.share(row.share),
        formats.count(row.tokens) if row.tokens else "",
        formats.quantity(row.flops, "FLOP") if row.flops else "",
        formats.quantity(row.tokens_per_s) if row.tokens_per_s else "",
        formats.number(row.tflops) if row.tflops else "",
        formats.share(row.mfu) if row.mfu is not None else "",
    )
    head = Cell(words.stage(row.stage), colour=stage_variable(row.stage))
    return Row([head, Cell(words.meaning(row.stage), tone="muted"), *map(Cell, texts)])


def _step_row(rows: Sequence[StageRow], figures: Mapping[str, Any], words: Words) -> Row:
    flops, step_time = sum(row.flops for row in rows), figures["step_time_s"]
    texts = (
        formats.seconds(step_time),
        formats.share(1.0),
        "",
        formats.quantity(flops, "FLOP") if flops else formats.UNKNOWN,
        formats.quantity(figures["tokens_per_s"]),
        formats.number(flops / step_time / 1e12) if flops and step_time else formats.UNKNOWN,
        formats.share(figures["mfu_step"]),
    )
    return Row([Cell(words("stages.step")), Cell(), *map(Cell, texts)])


def rank_table(rows: Sequence[RankRow], words: Words) -> Table:
    """One row per rank, of the first 64; folded when they are many."""
    names = ("rank", "steps", "step", "busy", "", "update", "idle", "unaccounted", "tokens")
    columns = [Column(words(f"ranks.{name}") if name else "", is_text=name == "rank") for name in names]
    body = [_rank_row(row) for row in rows[:_MAX_RANKS]]
    return Table(
        words("ranks.title"), _ranks_caption(rows, words), columns, body, folded=len(rows) >= _FOLDED_FROM
    )


def _rank_row(row: RankRow) -> Row:
    return Row(
        [
            Cell(str(row.rank)),
            Cell(str(row.num_steps)),
            Cell(formats.seconds(row.step_s)),
            Cell(formats.share(row.busy_share)),
            Cell(meter=row.busy_share * 100),
            Cell(formats.seconds(row.update_actor_s)),
            Cell(formats.seconds(row.idle_s)),
            Cell(formats.seconds(row.unaccounted_s)),
            Cell(formats.count(row.update_actor_tokens)),
        ]
    )


def _ranks_caption(rows: Sequence[RankRow], words: Words) -> str:
    """What the table of ranks shows, and how even the work is."""
    parts = [words("ranks.caption")]
    for key, values in (
        ("ranks.uneven-time", [row.update_actor_s for row in rows]),
        ("ranks.uneven-tokens", [row.update_actor_tokens for row in rows]),
    ):
        mean = sum(values) / len(values)
        if mean:
            parts.append(words(key, ratio=formats.number(max(values) / mean)))
    if len(rows) > _MAX_RANKS:
        parts.append(words("ranks.first", shown=_MAX_RANKS, all=f"{len(rows):,}"))
    return words.sentences(*parts)


def counter_table(found: Sequence[Counter], has_metrics: bool, notes: Sequence[str], words: Words) -> Table:
    """Every counter that is not zero, and what the records lack."""
    columns = [
        Column(words("counters.count"), is_text=True),
        Column(words("counters.total")),
        Column(words("counters.where"), is_text=True),
        Column(words("counters.meaning"), is_text=True),
    ]
    rows = [
        Row(
            [
                Cell(counter.name, is_code=True),
                Cell(f"{counter.total:,.0f}"),
                Cell(counter.where, tone="muted"),
                Cell(counter.meaning, tone="muted"),
            ],
            counter.is_fault,
        )
        for counter in found
    ]
    caption = words("counters.caption" if rows else "counters.none" if has_metrics else "counters.unknown")
    return Table("", caption, columns, rows, notes=notes)
