"""The page of an ablation: what each feature did to the step, by how much, and whether the updates stayed the same."""

from datetime import UTC, datetime

from paceline.diagnosis.features import FEATURES
from paceline.lab.arms import as_overrides
from paceline.lab.results import Ablation, AblationRow, ArmFigures, FigureChange, RatioInterval, RunEntry
from paceline.report import formats
from paceline.report.blocks import Block, Cell, Column, Details, Fact, Page, Row, Table, Tone, charts, section
from paceline.report.charts_ablation import prediction_chart, ratio_chart, stage_chart
from paceline.report.details import environment
from paceline.report.tiles import Tile
from paceline.report.words import Words

_FIGURES = (
    ("tokens_per_s_per_device", formats.quantity),
    ("mfu", formats.share),
    ("peak_memory", formats.memory),
    ("host_memory", formats.memory),
    ("effective_share", formats.number),
    ("reward", formats.number),
    ("loss", formats.number),
)
_VERDICT_TONES: dict[str, Tone] = {"faster": "good", "slower": "bad"}
_CORRECTNESS_TONES: dict[str, Tone] = {"passed": "good", "failed": "bad", "not_checked": "muted"}


def build_ablation(found: Ablation, words: Words) -> Page:
    """Turns an ablation's record into the page's content."""
    return Page(
        kind=words("ablation.kind"),
        title=found.name,
        status=words(f"ablation.status-{found.status}"),
        status_class="good" if found.status == "complete" else "other",
        facts=_facts(found, words),
        sentences=_sentences(found, words),
        tiles=_tiles(found, words),
        sections=[
            *section("result", words("ablation.result"), _result(found, words)),
            *section("stages", words("ablation.where"), charts([stage_chart(found.rows, words)])),
            *section("figures", words("ablation.figures"), [_figure_table(found, words)]),
            *section("correctness", words("ablation.correctness"), [_correctness_table(found, words)]),
            *section("runs", words("ablation.runs"), [_run_table(found, words)]),
            *section("details", words("section.details"), _details(found, words)),
        ],
        footer=words("page.written", version="", time=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
    )


def _facts(found: Ablation, words: Words) -> list[Fact]:
    return [
        Fact(words("ablation.recipe"), found.recipe),
        Fact(words("ablation.pairs"), str(found.num_pairs)),
        Fact(
            words("ablation.steps"),
            words("ablation.steps-of", steps=found.num_steps, warmup=found.num_warmup),
        ),
        Fact(
            words("ablation.rollouts"), words("ablation.replayed" if found.replayed else "ablation.sampled")
        ),
    ]


def _sentences(found: Ablation, words: Words) -> list[str]:
    best = [row for row in found.rows if row.verdict == "faster" and row.step_time is not None]
    failed = [row.name for row in found.rows if row.correctness.status == "failed"]
    sentences = []
    if best:
        row = min(best, key=lambda row: row.step_time.ratio if row.step_time else 1.0)
        sentences.append(
            words(
                "ablation.best", name=row.name, ratio=_ratio(row.step_time), interval=_interval(row.step_time)
            )
        )
    elif found.rows:
        sentences.append(words("ablation.none-faster"))
    if failed:
        sentences.append(words("ablation.failed-arms", names=", ".join(failed)))
    sentences.append(words("ablation.corrected", alpha=formats.share(found.alpha, 0)))
    return sentences


def _tiles(found: Ablation, words: Words) -> list[Tile]:
    counts = {verdict: sum(row.verdict == verdict for row in found.rows) for verdict in _VERDICTS}
    baseline = found.baseline
    return [
        Tile(
            words("ablation.baseline-step"),
            formats.seconds(baseline.step_s) if baseline else formats.UNKNOWN,
            words("ablation.per-step"),
            wide=True,
        ),
        *(
            Tile(words(f"ablation.{verdict}"), str(count), words("ablation.of-arms", count=len(found.rows)))
            for verdict, count in counts.items()
        ),
        Tile(
            words("ablation.tile-runs"),
            str(sum(run.status == "completed" for run in found.runs)),
            words("ablation.of-runs", count=len(found.runs)),
        ),
    ]


_VERDICTS = ("faster", "slower", "no_difference", "undecided")


def _result(found: Ablation, words: Words) -> list[Block]:
    return [
        *charts([ratio_chart(found.rows, found.margin, words)]),
        _result_table(found, words),
        *charts([prediction_chart(found.rows, words)]),
    ]


def _result_table(found: Ablation, words: Words) -> Table:
    names = ("arm", "verdict", "step-time", "ratio", "interval", "p", "saved", "predicted", "updates")
    columns = [
        Column(words(f"ablation.{name}"), is_text=name in ("arm", "verdict", "updates")) for name in names
    ]
    rows = [_result_row(row, found.baseline, words) for row in found.rows]
    if found.baseline is not None:
        cells = [Cell(words("ablation.baseline")), Cell(), Cell(formats.seconds(found.baseline.step_s))]
        rows.insert(0, Row([*cells, Cell("1"), Cell(), Cell(), Cell(), Cell(), Cell()]))
    return Table(words("ablation.table"), words("ablation.table-caption"), columns, rows)


def _result_row(row: AblationRow, baseline: ArmFigures | None, words: Words) -> Row:
    time, saved, predicted = row.step_time, row.saved_s, row.predicted
    status = row.correctness.status
    return Row(
        [
            Cell(_arm_name(row, words), note="" if not row.message else row.message),
            Cell(words(f"ablation.{row.verdict}"), tone=_VERDICT_TONES.get(row.verdict, "muted")),
            Cell(formats.seconds(row.arm.step_s if row.arm else None)),
            Cell(_ratio(time)),
            Cell(_interval(time), tone="muted"),
            Cell(_p_value(time), tone="muted"),
            Cell(_seconds(None if saved is None else saved.mean)),
            Cell(_seconds(None if predicted is None else predicted.saved_s)),
            Cell(words(f"ablation.{status}"), tone=_CORRECTNESS_TONES[status]),
        ]
    )


def _arm_name(row: AblationRow, words: Words) -> str:
    """The arm's own name, with the title of its feature where the map has it."""
    feature = FEATURES.get(row.name)
    return f"{row.name} ({feature.title[words.lang]})" if feature is not None else row.name


def _ratio(time: RatioInterval | None) -> str:
    return formats.UNKNOWN if time is None else f"{time.ratio:.3f}"


def _interval(time: RatioInterval | None) -> str:
    if time is None or time.low is None or time.high is None:
        return formats.UNKNOWN
    return f"{time.low:.3f} – {time.high:.3f}"


def _p_value(time: RatioInterval | None) -> str:
    if time is None:
        return formats.UNKNOWN
    value = time.p_value if time.adjusted_p is None else time.adjusted_p
    return formats.UNKNOWN if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return formats.UNKNOWN
    return f"{'−' if value < 0 else ''}{formats.seconds(abs(value))}"


def _figure_table(found: Ablation, words: Words) -> Table:
    present = [
        key
        for key, _ in _FIGURES  # a figure that is zero everywhere was not measured: device memory on a CPU
        if any(key in row.figures and row.figures[key].feature for row in found.rows)
    ]
    columns = [
        Column(words("ablation.arm"), is_text=True),
        *(Column(words(f"ablation.{key}")) for key in present),
    ]
    forms = dict(_FIGURES)
    rows = [
        Row([Cell(row.name), *(_figure_cell(row.figures.get(key), key, forms[key]) for key in present)])
        for row in found.rows
    ]
    return Table("", words("ablation.figures-caption"), columns, rows)


def _figure_cell(change: FigureChange | None, key: str, form: object) -> Cell:
    if change is None or not callable(form):
        return Cell(formats.UNKNOWN)
    note = ""
    if change.ratio is not None:
        note = f"× {change.ratio.ratio:.3f}"
    elif key in ("reward", "loss"):
        note = f"{change.difference.mean:+.3g}".replace("-", "−")
    return Cell(str(form(change.feature)), note=note)


def _correctness_table(found: Ablation, words: Words) -> Table:
    names = (
        "arm",
        "updates",
        "reason",
        "tolerance",
        "loss-difference",
        "grad-difference",
        "repeat-difference",
    )
    columns = [Column(words(f"ablation.{name}"), is_text=name in names[:3]) for name in names]
    rows = []
    for row in found.rows:
        one = row.correctness
        numbers = (one.tolerance, one.loss_difference, one.grad_norm_difference, one.repeat_loss_difference)
        rows.append(
            Row(
                [
                    Cell(row.name),
                    Cell(words(f"ablation.{one.status}"), tone=_CORRECTNESS_TONES[one.status]),
                    Cell(words(f"ablation.{one.reason}"), tone="muted"),
                    *(Cell(formats.UNKNOWN if number is None else f"{number:.2g}") for number in numbers),
                ]
            )
        )
    return Table("", words("ablation.correctness-caption"), columns, rows)


def _run_table(found: Ablation, words: Words) -> Table:
    columns = [
        Column(words(f"ablation.{name}"), is_text=name in ("arm", "status", "message"))
        for name in ("arm", "round", "position", "status", "seconds", "message")
    ]
    rows = [_run_row(run, words) for run in found.runs]
    return Table(words("ablation.run-table"), words("ablation.runs-caption"), columns, rows, folded=True)


def _run_row(run: RunEntry, words: Words) -> Row:
    return Row(
        [
            Cell(run.arm),
            Cell(str(run.round)),
            Cell(str(run.position)),
            Cell(words(f"ablation.run-{run.status}"), tone="bad" if run.status == "failed" else ""),
            Cell(formats.seconds(run.seconds)),
            Cell(run.message, tone="muted"),
        ]
    )


def _details(found: Ablation, words: Words) -> list[Block]:
    keys = [
        Row(
            [
                Cell(row.name),
                Cell(", ".join(as_overrides(row.keys)), is_code=True),
            ]
        )
        for row in found.rows
    ]
    columns = [Column(words("ablation.arm"), is_text=True), Column(words("ablation.keys"), is_text=True)]
    overrides = words("ablation.overrides", settings=" ".join(found.overrides)) if found.overrides else ""
    groups = environment(found.environment, words)
    return [
        Table(words("ablation.settings"), overrides, columns, keys),
        *([Details(groups)] if groups else []),
    ]
