"""Rows of the page's tables, as text."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.report import wording
from paceline.report.counters import Counter
from paceline.report.palette import MEANINGS, STAGE_COLOURS
from paceline.report.stage_totals import RankRow, StageRow

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


def stage_views(rows: Sequence[StageRow]) -> list[StageView]:
    """One view per stage."""
    return [
        StageView(
            name=row.stage,
            meaning=MEANINGS.get(row.stage, ""),
            colour=f"var(--stage-{row.stage})" if row.stage in STAGE_COLOURS else "var(--other)",
            width=row.share * 100,
            seconds=wording.seconds(row.seconds),
            share=wording.share(row.share),
            tokens=wording.count(row.tokens) if row.tokens else "",
            flops=wording.quantity(row.flops, "FLOP") if row.flops else "",
            tokens_per_s=wording.quantity(row.tokens_per_s) if row.tokens_per_s else "",
            tflops=wording.number(row.tflops) if row.tflops else "",
            mfu=wording.share(row.mfu) if row.mfu is not None else "",
        )
        for row in rows
    ]


def rank_views(rows: Sequence[RankRow]) -> list[RankView]:
    """One view per rank, of the first 64."""
    return [
        RankView(
            rank=row.rank,
            num_steps=row.num_steps,
            step=wording.seconds(row.step_s),
            busy=wording.share(row.busy_share),
            busy_percent=row.busy_share * 100,
            update_actor=wording.seconds(row.update_actor_s),
            idle=wording.seconds(row.idle_s),
            unaccounted=wording.seconds(row.unaccounted_s),
            tokens=wording.count(row.update_actor_tokens),
        )
        for row in rows[:_MAX_RANKS]
    ]


def ranks_caption(rows: Sequence[RankRow]) -> str:
    """What the table of ranks shows, and how even the work is."""
    if not rows:
        return ""
    text = "Means per step. Busy: neither idle nor unaccounted."
    for label, values in (
        ("actor update time", [row.update_actor_s for row in rows]),
        ("tokens trained on", [row.update_actor_tokens for row in rows]),
    ):
        mean = sum(values) / len(values)
        if mean:
            text += f" Largest {label} over the mean: {wording.number(max(values) / mean)}."
    if len(rows) > _MAX_RANKS:
        text += f" The first {_MAX_RANKS} of {len(rows):,} ranks."
    return text


def counter_views(found: Sequence[Counter]) -> list[CounterView]:
    """One view per counter."""
    return [
        CounterView(counter.name, f"{counter.total:,.0f}", counter.where, counter.meaning, counter.is_fault)
        for counter in found
    ]
