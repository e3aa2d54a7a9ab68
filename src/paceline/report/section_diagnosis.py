"""The diagnosis on the page: what bounds the run, what it waits for, what stands out, which switches would help."""

from collections.abc import Sequence

import plotly.graph_objects as go

from paceline.diagnosis import Diagnosis, Finding, StageDiagnosis, Switch, Wait
from paceline.diagnosis import wording as said
from paceline.diagnosis.features import FEATURES
from paceline.report import formats
from paceline.report.blocks import Block, Cell, Column, Fact, Item, Lines, Ranking, Row, Table, charts
from paceline.report.palette import CAUSE_COLOURS, stage_variable
from paceline.report.theme import Chart, new_figure
from paceline.report.words import Words

_MAX_SWITCHES = 12
_LEAST_SHARE = 0.001
"""Stages below this share of a step have no row: nothing that bounds them matters."""


def diagnosis_blocks(found: Diagnosis, words: Words) -> list[Block]:
    """Bottleneck and stages, waits, findings, switches, notes."""
    blocks: list[Block] = [_stages(found, words)]
    blocks += charts([waits_chart(found.waits, words)])
    if found.findings:
        items = [_finding(finding, found, words) for finding in found.findings]
        blocks.append(Ranking(words("diagnosis.findings"), words("diagnosis.findings-caption"), items))
    keeping = [switch for switch in found.switches if not switch.changes_training]
    changing = [switch for switch in found.switches if switch.changes_training]
    blocks += _switches("diagnosis.switches", keeping, found, words)
    blocks += _switches("diagnosis.changing", changing, found, words)
    if found.notes:
        blocks.append(Lines([_plain(said.note(note, words.lang)) for note in found.notes]))
    return blocks


def _switches(name: str, switches: Sequence[Switch], found: Diagnosis, words: Words) -> list[Block]:
    """One ranking of switches, with what it leaves out said."""
    if not switches:
        return []
    shown = switches[:_MAX_SWITCHES]
    caption = words(f"{name}-caption")
    if len(switches) > len(shown):
        caption = words.sentences(caption, words("diagnosis.more", shown=len(shown), all=len(switches)))
    return [Ranking(words(name), caption, [_switch(switch, found, words) for switch in shown])]


def bottleneck_sentence(found: Diagnosis, words: Words) -> str:
    """The stage that takes most of a step and what bounds it; empty where nothing is known."""
    bottleneck = found.bottleneck
    if bottleneck is None or not found.step_s:
        return ""
    return words(
        "diagnosis.bottleneck" if bottleneck.is_measured else "diagnosis.usual-bottleneck",
        stage=words.stage(bottleneck.stage),
        cause=words.cause(bottleneck.kind),
        time=formats.seconds(bottleneck.seconds),
        share=formats.share(bottleneck.seconds / found.step_s, 0),
    )


def _plain(text: str) -> str:
    """A sentence of the terminal, which marks code with backticks, on a page."""
    return text.replace("`", "")


def _stages(found: Diagnosis, words: Words) -> Table:
    names = ("stage", "time", "share", "", "kind", "evidence")
    columns = [
        Column(
            words(f"diagnosis.{name}") if name else "",
            is_text=name not in ("time", "share"),
            hides=name == "evidence",
        )
        for name in names
    ]
    longest = max((stage.seconds for stage in found.stages), default=0.0)
    rows = [_stage_row(stage, longest, words) for stage in found.stages if stage.share >= _LEAST_SHARE]
    caption = words.sentences(
        words(
            "diagnosis.stages-caption",
            steps=words.number_of("step", found.num_steps),
            warmup=found.num_warmup_steps,
            profiled=found.num_profiled_steps,
        )
    )
    return Table(words("diagnosis.stages"), caption, columns, rows)


def _stage_row(stage: StageDiagnosis, longest: float, words: Words) -> Row:
    evidence = " · ".join(
        said.sentence(one, words.lang)
        for one in stage.evidence
        if one.name not in ("seconds", "share", "low", "high") and not one.name.startswith("cell_")
    )
    return Row(
        [
            Cell(words.stage(stage.stage), colour=stage_variable(stage.stage)),
            Cell(formats.seconds(stage.seconds)),
            Cell(formats.share(stage.share)),
            Cell(meter=100 * stage.seconds / longest),
            Cell(
                words.cause(stage.kind),
                colour=f"var(--cause-{stage.kind})",
                note=words(f"diagnosis.source-{stage.source}"),
            ),
            Cell(evidence, tone="muted"),
        ]
    )


def waits_chart(waits: Sequence[Wait], words: Words) -> Chart | None:
    """Seconds per step waited, by what for, with intervals; None where nothing was waited for."""
    shown = sorted((wait for wait in waits if wait.seconds > 0), key=lambda wait: wait.seconds)
    if not shown:
        return None
    figure = new_figure(bargap=0.35)
    figure.add_trace(
        go.Bar(
            orientation="h",
            x=[wait.seconds for wait in shown],
            y=[said.wait_name(wait.kind, words.lang) for wait in shown],
            marker={"color": CAUSE_COLOURS["queue"].light},
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [max(0.0, wait.high - wait.seconds) for wait in shown],
                "arrayminus": [max(0.0, wait.seconds - wait.low) for wait in shown],
                "thickness": 1.3,
                "width": 4,
                "color": CAUSE_COLOURS["scheduling"].light,
            },
            customdata=[f"{formats.seconds(wait.seconds)}, {formats.share(wait.share)}" for wait in shown],
            hovertemplate="%{y}: %{customdata}<extra></extra>",
        )
    )
    figure.update_xaxes(title_text=words("diagnosis.per-step"), showgrid=True, rangemode="tozero")
    figure.update_yaxes(showgrid=False)
    height = 62 + 30 * max(2, len(shown))
    return Chart("waits", words("diagnosis.waits"), words("diagnosis.waits-caption"), figure, height)


def _finding(finding: Finding, found: Diagnosis, words: Words) -> Item:
    scale = max(one.high for one in found.findings) or 1.0
    head = words("diagnosis.cell", stage=words.stage(finding.stage), cause=words.cause(finding.cause))
    return Item(
        head=head,
        amount=_amount(finding.seconds, finding.low, finding.high, words),
        text=said.sentence(finding, words.lang),
        bar=_bar(finding.seconds, finding.low, finding.high, scale),
    )


def _switch(switch: Switch, found: Diagnosis, words: Words) -> Item:
    feature = FEATURES[switch.feature]
    scale = max(one.high for one in found.switches) or 1.0
    return Item(
        head=feature.title[words.lang],
        amount=_amount(switch.saved_s, switch.low, switch.high, words),
        text=feature.effect[words.lang],
        details=[
            Fact(words("diagnosis.risk"), _plain(said.risk(switch, words.lang))),
            Fact(words("diagnosis.prerequisite"), _plain(said.prerequisite(switch, words.lang))),
            Fact(words("diagnosis.reduces"), words.cause(switch.cause)),
        ],
        code=[f"{key}={_setting(value)}" for key, value in switch.keys.items()],
        bar=_bar(switch.saved_s, switch.low, switch.high, scale),
    )


def _amount(value: float, low: float, high: float, words: Words) -> str:
    return words(
        "diagnosis.amount",
        value=formats.seconds(value),
        low=formats.seconds(max(0.0, low)),
        high=formats.seconds(high),
    )


def _bar(value: float, low: float, high: float, scale: float) -> Cell:
    def place(seconds: float) -> float:
        return 100 * min(1.0, max(0.0, seconds / scale))

    return Cell(low=place(low), mid=place(value), high=place(high), zero=0.0)


def _setting(value: object) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
