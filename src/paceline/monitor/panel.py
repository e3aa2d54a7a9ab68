"""A snapshot as one panel in the terminal."""

import math
from collections.abc import Callable

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.monitor.drawing import STAGE_COLOURS, format_seconds, sparkline
from paceline.monitor.snapshot import STEPS_IN_MEANS, Snapshot
from paceline.monitor.words import PANEL, Lang, say
from paceline.telemetry.run_process import STATUS_TEXTS

_BAR = 32
_LEAST_SHARE = 0.002
_STATUS_STYLES = {
    **dict.fromkeys(("running", "completed"), "green"),
    **dict.fromkeys(("failed", "refused", "died"), "bold red"),
    "starting": "yellow",
}

_STAGE_WIDTH = 13

_SHARE = "{:.1%}"

# metric, format, unit by its text; a metric that the run has not recorded has no row
_FIGURES = (
    ("accuracy/train", _SHARE, None),
    ("eval/accuracy", _SHARE, None),
    ("loss/total", "{:.4g}", None),
    ("eval/loss", "{:.4g}", None),
    ("entropy", "{:.3g}", "nats"),
    ("grad_norm", "{:.3g}", None),
    ("response_length/mean", "{:,.1f}", "tokens"),
    ("throughput/tokens_per_s", "{:,.0f}", "tokens-per-s"),
    ("throughput/tokens_per_s_per_device", "{:,.0f}", "tokens-per-s"),
    ("throughput/generated_tokens_per_s", "{:,.0f}", "tokens-per-s"),
    ("mfu/step", _SHARE, None),
    ("mfu/update_actor", _SHARE, None),
    ("tokens/effective_share", _SHARE, None),
)
_MEMORY = ("memory/peak_allocated", "memory/peak_reserved", "memory/host_rss")


def panel(
    snapshot: Snapshot,
    bottleneck: str | None = None,
    lang: Lang = "en",
    stage_name: Callable[[str], str] = str,
) -> RenderableType:
    """The panel. `bottleneck` is a sentence of the diagnosis, where one has been made; `stage_name` says a stage in
    the reader's language."""
    parts: list[RenderableType] = [_head(snapshot, lang)]
    if snapshot.message:
        parts.append(Text(snapshot.message, style="dim"))
    parts.append(_figures(snapshot, lang))
    if snapshot.step_s is not None:
        parts += [Text(), _stages(snapshot, lang, stage_name)]
    if bottleneck:
        parts += [Text(), Text(f"{say(PANEL, 'bottleneck', lang)}  {bottleneck}", style="bold")]
    parts.append(_alarms(snapshot, lang))
    ranks = say(PANEL, "rank" if snapshot.num_ranks == 1 else "ranks", lang, count=snapshot.num_ranks or "?")
    return Panel(Group(*parts), title=Text(f"{snapshot.name} · {ranks}"), border_style="dim")


def _head(snapshot: Snapshot, lang: Lang) -> RenderableType:
    head = Table.grid(padding=(0, 2))
    known = say(STATUS_TEXTS, snapshot.status, lang) if snapshot.status in STATUS_TEXTS else snapshot.status
    status = Text(known, style=_STATUS_STYLES.get(snapshot.status, "white"))
    if snapshot.num_steps is None:
        head.add_row(status, say(PANEL, "step", lang, step=snapshot.step))
        return head
    bar = ProgressBar(total=max(1, snapshot.num_steps), completed=snapshot.step, width=_BAR)
    left = ""
    if snapshot.left_s is not None:
        left = say(PANEL, "left", lang, time=format_seconds(snapshot.left_s))
    head.add_row(status, say(PANEL, "step-of", lang, step=snapshot.step, all=snapshot.num_steps), bar, left)
    return head


def _figures(snapshot: Snapshot, lang: Lang) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    if snapshot.step_s is not None:
        table.add_row(say(PANEL, "step-time", lang), f"{snapshot.step_s:.4g} s", _curve(snapshot.step_times))
    if snapshot.reward:
        table.add_row(say(PANEL, "reward", lang), f"{snapshot.reward[-1]:.3f}", _curve(snapshot.reward))
    for metric, form, unit in _FIGURES:
        value = snapshot.metrics.get(metric)
        if value is not None:
            # shared prompts train on more tokens than they compute: a factor, no share of anything
            number = f"{value:.1f} x" if form == _SHARE and value > 1.0 else form.format(value)
            curve = _curve(snapshot.eval_accuracy) if metric == "eval/accuracy" else Text()
            shown = number if unit is None else say(PANEL, unit, lang, value=number)
            table.add_row(say(PANEL, metric, lang), shown, curve)
    for metric in _MEMORY:
        if value := snapshot.metrics.get(metric):
            table.add_row(say(PANEL, metric, lang), f"{value / 2**30:,.2f} GiB", Text())
    return table


def _curve(values: tuple[float, ...]) -> Text:
    finite = [value for value in values if math.isfinite(value)]
    return Text(sparkline(finite) if len(finite) > 1 else "", style="green")


def _stages(snapshot: Snapshot, lang: Lang, stage_name: Callable[[str], str]) -> RenderableType:
    assert snapshot.step_s is not None
    table = Table.grid(padding=(0, 1))
    times = {**snapshot.stages, "unaccounted": snapshot.unaccounted_s or 0.0}
    for stage, seconds in times.items():
        share = seconds / snapshot.step_s if snapshot.step_s else 0.0
        if share < _LEAST_SHARE:
            continue
        bar = Text("█" * max(1, round(share * _BAR)), style=STAGE_COLOURS.get(stage, "white"))
        name = stage_name(stage)
        name += " " * (_STAGE_WIDTH - cell_len(name))
        table.add_row(name, f"{seconds:>8.3g} s", f"{share:>6.1%}", bar)
    return Group(Text(say(PANEL, "stages", lang, steps=STEPS_IN_MEANS), style="dim"), table)


def _alarms(snapshot: Snapshot, lang: Lang) -> RenderableType:
    if not snapshot.alarms:
        return Text(say(PANEL, "no-alarms", lang), style="dim")
    texts = (alarm.text if lang == "en" else alarm.text_zh for alarm in snapshot.alarms)
    return Group(*(Text(f"! {text}", style="bold red") for text in texts))
