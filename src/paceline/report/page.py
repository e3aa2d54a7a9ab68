"""Everything the page shows, as text and charts, in the order of the template."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from paceline.report import formats
from paceline.report.charts_learning import Constant, accuracy_chart, reward_chart, small_charts
from paceline.report.charts_loss import loss_chart, perplexity_chart
from paceline.report.charts_memory import memory_by_stage, memory_over_steps
from paceline.report.charts_time import breakdown_chart
from paceline.report.charts_timeline import run_timeline, step_timeline
from paceline.report.counters import counters
from paceline.report.details import DetailGroup, configuration, environment
from paceline.report.figures import figures_of, is_supervised
from paceline.report.rows import (
    CounterView,
    RankView,
    StageView,
    counter_views,
    rank_views,
    ranks_caption,
    stage_views,
)
from paceline.report.run_data import RunData
from paceline.report.sample_views import SampleStep, sample_steps, shared_beginning
from paceline.report.sentences import summary_sentences
from paceline.report.stage_totals import rank_rows, stage_rows, stage_totals
from paceline.report.theme import Chart
from paceline.report.tiles import Tile, tiles
from paceline.report.words import Words

_STATUSES = ("completed", "failed", "stopped", "imported", "running", "unknown")
_STATUS_CLASSES = {"completed": "good", "failed": "bad"}


@dataclass(frozen=True, slots=True)
class Fact:
    """A label with a short value, in the header."""

    label: str
    value: str


@dataclass(frozen=True, slots=True)
class Page:
    """The report's content. All texts are plain: the template escapes them."""

    title: str
    status: str
    status_class: str
    facts: list[Fact]
    sentences: list[str]
    tiles: list[Tile]
    stages: list[StageView]
    step_cells: list[str]
    mfu_note: str
    main_rank: int
    time_charts: list[Chart]
    ranks: list[RankView]
    ranks_caption: str
    main_learning_charts: list[Chart]
    small_charts: list[Chart]
    constants: list[Constant]
    memory_charts: list[Chart]
    counters: list[CounterView]
    has_metrics: bool
    notes: list[str]
    shared_prompt: str
    sample_steps: list[SampleStep]
    detail_groups: list[DetailGroup]
    footer: str

    @property
    def charts(self) -> list[Chart]:
        """All charts, in the order of the page."""
        return [*self.time_charts, *self.main_learning_charts, *self.small_charts, *self.memory_charts]


def build_page(run: RunData, words: Words) -> Page:
    """Turns records into the page's content."""
    figures = figures_of(run)
    small, constants = small_charts(run, words)
    ranks = rank_rows(run.ledgers) if len(run.ledgers) > 1 else []
    shared = shared_beginning(run.samples)
    status = figures["status"]
    return Page(
        title=figures["run"],
        status=words(f"status.{status}") if status in _STATUSES else status,
        status_class=_STATUS_CLASSES.get(status, "other"),
        facts=_facts(run, figures, words),
        sentences=summary_sentences(figures, words),
        tiles=tiles(figures, words),
        stages=stage_views(stage_rows(run), words),
        step_cells=_step_cells(run, figures),
        mfu_note=_mfu_note(figures, words),
        main_rank=run.main_ledger.rank if run.main_ledger else 0,
        time_charts=_time_charts(run, words),
        ranks=rank_views(ranks),
        ranks_caption=ranks_caption(ranks, words),
        main_learning_charts=_main_learning_charts(run, figures, words),
        small_charts=small,
        constants=constants,
        memory_charts=_memory_charts(run, words),
        counters=counter_views(counters(run, words)),
        has_metrics=bool(run.history.records) and status != "imported",  # others do not count what we count
        notes=[note.say(words) for note in run.notes],
        shared_prompt=shared,
        sample_steps=sample_steps(run.samples, shared, words),
        detail_groups=[*configuration(run.config, words), *environment(run.environment, words)],
        footer=_footer(run, words),
    )


def _present(*charts: Chart | None) -> list[Chart]:
    return [chart for chart in charts if chart is not None]


def _main_learning_charts(run: RunData, figures: Mapping[str, Any], words: Words) -> list[Chart]:
    if is_supervised(run):
        return _present(loss_chart(run, words), perplexity_chart(run, words))
    return _present(reward_chart(run, words), accuracy_chart(run, figures, words))


def _time_charts(run: RunData, words: Words) -> list[Chart]:
    ledger = run.main_ledger
    if ledger is None:
        return []
    return _present(
        breakdown_chart(run.steps, words), step_timeline(ledger, words), run_timeline(ledger, words)
    )


def _memory_charts(run: RunData, words: Words) -> list[Chart]:
    ledger = run.main_ledger
    if ledger is None:
        return []
    sections = [section for process in ledger.processes for section in process.sections]
    by_stage = memory_by_stage(stage_totals(sections), words)
    return _present(by_stage, memory_over_steps(run.steps, by_stage.height, words) if by_stage else None)


def _facts(run: RunData, figures: Mapping[str, Any], words: Words) -> list[Fact]:
    algorithm = figures["algorithm"]
    planned = run.summary.get("num_steps_planned") if is_supervised(run) else run.setting("run.num_steps")
    done = f"{figures['num_steps']:,}"
    if planned:
        done = words("fact.steps-of", done=done, planned=f"{planned:,}")
    found = (
        ("model", figures["model"]),
        ("task", figures["task"]),
        ("algorithm", algorithm),
        ("steps", done),
        ("device", figures["device"]),
        ("ranks", str(figures["num_ranks"]) if figures["num_ranks"] > 1 else None),
        ("started", _started(run)),
        ("recorded", formats.seconds(figures["wall_s"]) if figures["wall_s"] else None),
    )
    return [Fact(words(f"fact.{key}"), value) for key, value in found if value]


def _started(run: RunData) -> str | None:
    times = [process.unix_s for ledger in run.ledgers for process in ledger.processes]
    return f"{datetime.fromtimestamp(min(times), UTC):%Y-%m-%d %H:%M} UTC" if times else None


def _step_cells(run: RunData, figures: Mapping[str, Any]) -> list[str]:
    """The last row of the stage table: time, share, tokens, FLOPs, tokens/s, TFLOP/s, MFU of the whole step."""
    rows = stage_rows(run)
    flops, step_time = sum(row.flops for row in rows), figures["step_time_s"]
    return [
        formats.seconds(step_time),
        formats.share(1.0),
        "",
        formats.quantity(flops, "FLOP") if flops else formats.UNKNOWN,
        formats.quantity(figures["tokens_per_s"]),
        formats.number(flops / step_time / 1e12) if flops and step_time else formats.UNKNOWN,
        formats.share(figures["mfu_step"]),
    ]


def _mfu_note(figures: Mapping[str, Any], words: Words) -> str:
    if figures["peak_tflops"] is None:
        return words("stages.no-peak")
    return words("stages.peak", peak=formats.number(figures["peak_tflops"]))


def _footer(run: RunData, words: Words) -> str:
    versions = run.environment.get("packages")
    version = versions.get("paceline") if isinstance(versions, Mapping) else None
    decision = run.summary.get("old_logprob")
    return words.sentences(
        words(
            "page.written",
            version=f" {version}" if version else "",
            time=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        ),
        words("page.old-logprob", source=decision.get("source"), reason=decision.get("reason"))
        if isinstance(decision, Mapping)
        else "",
        words("page.json"),
    )
