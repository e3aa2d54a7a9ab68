"""A run's page: its header, and its sections in order."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from paceline.diagnosis import Diagnosis, diagnose
from paceline.report import formats
from paceline.report.blocks import Block, Details, Fact, Lines, Page, Samples, Section, charts, section
from paceline.report.charts_causes import causes_by_stage, causes_by_step, kernel_table
from paceline.report.charts_device import device_chart, host_chart
from paceline.report.charts_efficiency import mfu_against_waiting
from paceline.report.charts_learning import accuracy_chart, reward_chart, small_charts
from paceline.report.charts_lengths import length_chart, tokens_per_rank, tokens_per_step
from paceline.report.charts_loss import loss_chart, perplexity_chart
from paceline.report.charts_memory import memory_by_stage, memory_over_steps
from paceline.report.charts_memory_timeline import memory_timeline
from paceline.report.charts_rank_timeline import rank_timeline
from paceline.report.charts_ranks import utilisation_heatmap
from paceline.report.charts_roofline import roofline_chart
from paceline.report.charts_sources import source_chart
from paceline.report.charts_time import breakdown_chart
from paceline.report.charts_timeline import run_timeline, step_timeline
from paceline.report.counters import counters
from paceline.report.details import configuration, environment
from paceline.report.figures import figures_of, is_supervised
from paceline.report.rows import counter_table, rank_table, stage_table, strip
from paceline.report.run_data import RunData
from paceline.report.sample_views import sample_steps, shared_beginning
from paceline.report.section_diagnosis import bottleneck_sentence, diagnosis_blocks
from paceline.report.sentences import summary_sentences
from paceline.report.stage_totals import rank_rows, stage_rows, stage_totals
from paceline.report.tiles import tiles
from paceline.report.words import Words
from paceline.telemetry.roofline import Roofline, roofline_of, run_ceilings

_STATUS_CLASSES = {"completed": "good", "failed": "bad", "died": "bad", "refused": "bad"}


def build_page(run: RunData, words: Words) -> Page:
    """Turns records into the page's content."""
    figures = figures_of(run)
    found = _diagnosed(run) if run.steps and run.config else None
    status = figures["status"]
    return Page(
        kind=words("page.kind"),
        title=figures["run"],
        status=words.status(status),
        status_class=_STATUS_CLASSES.get(status, "other"),
        facts=facts_of(run, figures, words),
        sentences=[
            *summary_sentences(figures, words),
            *([bottleneck] if found and (bottleneck := bottleneck_sentence(found, words)) else []),
        ],
        tiles=tiles(figures, words),
        sections=[
            *section(
                "diagnosis", words("section.diagnosis"), diagnosis_blocks(found, words) if found else []
            ),
            *section("time", words("section.time"), _time(run, figures, words)),
            *section("timelines", words("section.timelines"), _timelines(run, words)),
            *section("ranks", words("section.ranks"), _ranks(run, words)),
            *section("efficiency", words("section.efficiency"), _efficiency(run, words)),
            *section("learning", words("section.learning"), _learning(run, figures, words)),
            *section("lengths", words("section.lengths"), _lengths(run, words)),
            *section("memory", words("section.memory"), _memory(run, words)),
            *section("devices", words("section.devices"), _devices(run, words)),
            *section("counters", words("section.counters"), _counters(run, figures, words)),
            *_samples(run, words),
            *section("details", words("section.details"), _details(run, words)),
        ],
        footer=_footer(run, words),
    )


def _diagnosed(run: RunData) -> Diagnosis:
    return diagnose(run.run_dir, run.ledgers, run.detailed_steps)


def _time(run: RunData, figures: Mapping[str, Any], words: Words) -> list[Block]:
    rows, ledger = stage_rows(run), run.main_ledger
    if ledger is None or not rows:
        return [Lines([words("time.no-step")])]
    return [
        strip(rows, words),
        *charts([breakdown_chart(run.steps, words)]),
        stage_table(rows, figures, ledger.rank, words),
        *charts([causes_by_stage(run.causes, words), causes_by_step(run.causes, words)]),
        *([kernels] if (kernels := kernel_table(run.causes, words)) else []),
    ]


def _timelines(run: RunData, words: Words) -> list[Block]:
    ledger = run.main_ledger
    if ledger is None:
        return []
    return charts([rank_timeline(run, words), step_timeline(ledger, words), run_timeline(ledger, words)])


def _ranks(run: RunData, words: Words) -> list[Block]:
    rows = (
        rank_rows({rank: run.timed_of(steps) for rank, steps in run.rank_steps.items()})
        if len(run.ledgers) > 1
        else []
    )
    table = [rank_table(rows, words)] if rows else []
    return [*charts([utilisation_heatmap(run.rank_steps, words)]), *table]


def _efficiency(run: RunData, words: Words) -> list[Block]:
    return charts([mfu_against_waiting(run, words), roofline_chart(_roofline(run), words)], "pair")


_MAX_ROOFLINE_STEPS = 20_000


def _roofline(run: RunData) -> Roofline:
    """Of the steps of all ranks (of very many, the main rank's), without those that ran under a profiler."""
    profiled = {step.step for rank in run.causes for step in rank.steps}
    steps = [step for found in run.rank_steps.values() for step in found]
    plain = [
        step
        for step in (run.steps if len(steps) > _MAX_ROOFLINE_STEPS else steps)
        if step.step not in profiled
    ]
    return roofline_of(
        plain or run.steps, run_ceilings(run.environment), str(run.environment.get("dtype", ""))
    )


def _lengths(run: RunData, words: Words) -> list[Block]:
    found = [length_chart(run.samples, words), tokens_per_step(run, words), tokens_per_rank(run, words)]
    return charts(found, "pair")


def _devices(run: RunData, words: Words) -> list[Block]:
    return charts([device_chart(run.devices, words), host_chart(run.devices, words)], "pair")


def _learning(run: RunData, figures: Mapping[str, Any], words: Words) -> list[Block]:
    small, constants = small_charts(run, words)
    if is_supervised(run):
        main = charts([loss_chart(run, words), perplexity_chart(run, words)], "pair")
    else:
        main = charts([reward_chart(run, words), accuracy_chart(run, figures, words)], "pair")
    blocks = [*main, *charts([source_chart(run, words)]), *charts(small, "grid")] or [
        Lines([words("learning.no-metrics")])
    ]
    if constants:
        listed = " · ".join(f"{constant.name} {constant.value}" for constant in constants)
        blocks.append(Lines([f"{words('learning.constant')} {listed}"]))
    return blocks


def _memory(run: RunData, words: Words) -> list[Block]:
    ledger = run.main_ledger
    if ledger is None:
        return []
    sections = [section for process in ledger.processes for section in process.sections]
    by_stage = memory_by_stage(stage_totals(sections), words)
    over_steps = memory_over_steps(run.steps, by_stage.height, words) if by_stage else None
    timeline = memory_timeline(ledger, run.devices, words)
    return [*charts([timeline]), *charts([by_stage, over_steps], "pair")]


def _counters(run: RunData, figures: Mapping[str, Any], words: Words) -> list[Block]:
    # an imported run does not count what we count
    has_metrics = bool(run.history.records) and figures["status"] != "imported"
    notes = [note.say(words) for note in run.notes]
    return [counter_table(counters(run, words), has_metrics, notes, words)]


def _samples(run: RunData, words: Words) -> list[Section]:
    shared = shared_beginning(run.samples)
    steps = sample_steps(run.samples, shared, words)
    if not steps:
        return []
    hint = words("samples.shared", count=f"{len(shared):,}")
    blocks = [Samples(shared, hint, steps)]
    return section("samples", words("section.samples"), blocks, words("samples.caption"))


def _details(run: RunData, words: Words) -> list[Block]:
    groups = [*configuration(run.config, words), *environment(run.environment, words)]
    return [Details(groups)] if groups else []


def facts_of(run: RunData, figures: Mapping[str, Any], words: Words) -> list[Fact]:
    """What ran on what, for the header."""
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


def written_line(run: RunData, words: Words) -> str:
    """By which version of paceline the page was written, and when."""
    versions = run.environment.get("packages")
    version = versions.get("paceline") if isinstance(versions, Mapping) else None
    return words(
        "page.written",
        version=f" {version}" if version else "",
        time=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )


def _footer(run: RunData, words: Words) -> str:
    decision = run.summary.get("old_logprob")
    return words.sentences(
        written_line(run, words),
        words("page.old-logprob", source=decision.get("source"), reason=decision.get("reason"))
        if isinstance(decision, Mapping)
        else "",
        words("page.json"),
    )
