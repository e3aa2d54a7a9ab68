"""A snapshot as one panel in the terminal."""

import math

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.monitor.drawing import STAGE_COLOURS, format_seconds, sparkline
from paceline.monitor.snapshot import STEPS_IN_MEANS, Snapshot

_BAR = 32
_LEAST_SHARE = 0.002
_STATUS_STYLES = {
    **dict.fromkeys(("running", "completed"), "green"),
    **dict.fromkeys(("failed", "refused", "died"), "bold red"),
    "starting": "yellow",
}
_STATUS_TEXTS = {"died": "stopped without ending", "refused": "refused before starting"}

# name, metric, format; a metric that the run has not recorded has no row
_FIGURES = (
    ("accuracy (train)", "accuracy/train", "{:.1%}"),
    ("accuracy (held out)", "eval/accuracy", "{:.1%}"),
    ("loss", "loss/total", "{:.4g}"),
    ("held-out loss", "eval/loss", "{:.4g}"),
    ("entropy", "entropy", "{:.3g} nats"),
    ("gradient norm", "grad_norm", "{:.3g}"),
    ("response length", "response_length/mean", "{:,.1f} tokens"),
    ("throughput", "throughput/tokens_per_s", "{:,.0f} tokens/s"),
    ("  per device", "throughput/tokens_per_s_per_device", "{:,.0f} tokens/s"),
    ("  generated", "throughput/generated_tokens_per_s", "{:,.0f} tokens/s"),
    ("MFU (step)", "mfu/step", "{:.1%}"),
    ("MFU (update_actor)", "mfu/update_actor", "{:.1%}"),
    ("effective tokens", "tokens/effective_share", "{:.1%}"),
)
_MEMORY = (
    ("device memory", "memory/peak_allocated"),
    ("  reserved", "memory/peak_reserved"),
    ("host memory", "memory/host_rss"),
)


def panel(snapshot: Snapshot, bottleneck: str | None = None) -> RenderableType:
    """The panel. `bottleneck` is a sentence of the diagnosis, where one has been made."""
    parts: list[RenderableType] = [_head(snapshot)]
    if snapshot.message:
        parts.append(Text(snapshot.message, style="dim"))
    parts.append(_figures(snapshot))
    if snapshot.step_s is not None:
        parts += [Text(), _stages(snapshot)]
    if bottleneck:
        parts += [Text(), Text(f"bottleneck  {bottleneck}", style="bold")]
    parts.append(_alarms(snapshot))
    title = f"{snapshot.name} · {snapshot.num_ranks or '?'} rank{'s' if snapshot.num_ranks != 1 else ''}"
    return Panel(Group(*parts), title=Text(title), border_style="dim")


def _head(snapshot: Snapshot) -> RenderableType:
    head = Table.grid(padding=(0, 2))
    status = Text(
        _STATUS_TEXTS.get(snapshot.status, snapshot.status),
        style=_STATUS_STYLES.get(snapshot.status, "white"),
    )
    if snapshot.num_steps is None:
        head.add_row(status, f"step {snapshot.step}")
        return head
    bar = ProgressBar(total=max(1, snapshot.num_steps), completed=snapshot.step, width=_BAR)
    left = "" if snapshot.left_s is None else f"time left {format_seconds(snapshot.left_s)}"
    head.add_row(status, f"step {snapshot.step}/{snapshot.num_steps}", bar, left)
    return head


def _figures(snapshot: Snapshot) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    if snapshot.step_s is not None:
        table.add_row("step time", f"{snapshot.step_s:.4g} s", _curve(snapshot.step_times))
    if snapshot.reward:
        table.add_row("reward", f"{snapshot.reward[-1]:.3f}", _curve(snapshot.reward))
    for label, metric, form in _FIGURES:
        value = snapshot.metrics.get(metric)
        if value is not None:
            curve = _curve(snapshot.eval_accuracy) if metric == "eval/accuracy" else Text()
            table.add_row(label, form.format(value), curve)
    for label, metric in _MEMORY:
        if value := snapshot.metrics.get(metric):
            table.add_row(label, f"{value / 2**30:,.2f} GiB", Text())
    return table


def _curve(values: tuple[float, ...]) -> Text:
    finite = [value for value in values if math.isfinite(value)]
    return Text(sparkline(finite) if len(finite) > 1 else "", style="green")


def _stages(snapshot: Snapshot) -> RenderableType:
    assert snapshot.step_s is not None
    table = Table.grid(padding=(0, 1))
    times = {**snapshot.stages, "unaccounted": snapshot.unaccounted_s or 0.0}
    for stage, seconds in times.items():
        share = seconds / snapshot.step_s if snapshot.step_s else 0.0
        if share < _LEAST_SHARE:
            continue
        bar = Text("█" * max(1, round(share * _BAR)), style=STAGE_COLOURS.get(stage, "white"))
        table.add_row(f"{stage:<13}", f"{seconds:>8.3g} s", f"{share:>6.1%}", bar)
    return Group(Text(f"stages, mean of the last {STEPS_IN_MEANS} steps and all ranks", style="dim"), table)


def _alarms(snapshot: Snapshot) -> RenderableType:
    if not snapshot.alarms:
        return Text("no alarms", style="dim")
    return Group(*(Text(f"! {alarm.text}", style="bold red") for alarm in snapshot.alarms))
