"""Rows of the page's tables, as text."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.report import formats
from paceline.report.counters import Counter
from paceline.report.palette import STAGE_COLOURS
from paceline.report.stage_totals import RankRow, StageRow
from paceline.report.words import Words

_MAX_RANKS = 64


@dataclass(frozen=True, slots=True)
class StageView:
    """A stage in the strip, its legend and the table; `width` in percent, `colour` a CSS variable."""

    name: str
    meaning: str
    colour: str
    width: float
    seconds: str
    share: str
    tokens: str
    flops: str
    tokens_per_s: str
    tflops: str
    mfu: str


@dataclass(frozen=True, slots=True)
class RankView:
    """A rank's row."""

    rank: int
    num_steps: int
    step: str
    busy: str
    busy_percent: float
    update_actor: str
    idle: str
    unaccounted: str
    tokens: str


@dataclass(frozen=True, slots=True)
class CounterView:
    """A counter's row."""

    name: str
    total: str
    where: str
    meaning: str
    is_fault: bool


def stage_views(rows: Sequence[StageRow], words: Words) -> list[StageView]:
    """One view per stage."""
    return [
        StageView(
            name=words.stage(row.stage),
            meaning=words.meaning(row.stage),
            colour=f"var(--stage-{row.stage})" if row.stage in STAGE_COLOURS else "var(--other)",
            width=row.share * 100,
            seconds=formats.seconds(row.seconds),
            share=formats.share(row.share),
            tokens=formats.count(row.tokens) if row.tokens else "",
            flops=formats.quantity(row.flops, "FLOP") if row.flops else "",
            tokens_per_s=formats.quantity(row.tokens_per_s) if row.tokens_per_s else "",
            tflops=formats.number(row.tflops) if row.tflops else "",
            mfu=formats.share(row.mfu) if row.mfu is not None else "",
        )
        for row in rows
    ]


def rank_views(rows: Sequence[RankRow]) -> list[RankView]:
    """One view per rank, of the first 64."""
    return [
        RankView(
            rank=row.rank,
            num_steps=row.num_steps,
            step=formats.seconds(row.step_s),
            busy=formats.share(row.busy_share),
            busy_percent=row.busy_share * 100,
            update_actor=formats.seconds(row.update_actor_s),
            idle=formats.seconds(row.idle_s),
            unaccounted=formats.seconds(row.unaccounted_s),
            tokens=formats.count(row.update_actor_tokens),
        )
        for row in rows[:_MAX_RANKS]
    ]


def ranks_caption(rows: Sequence[RankRow], words: Words) -> str:
    """What the table of ranks shows, and how even the work is."""
    if not rows:
        return ""
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


def counter_views(found: Sequence[Counter]) -> list[CounterView]:
    """One view per counter."""
    return [
        CounterView(counter.name, f"{counter.total:,.0f}", counter.where, counter.meaning, counter.is_fault)
        for counter in found
    ]
