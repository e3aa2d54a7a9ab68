"""`paceline watch RUN`: a run in the terminal while it goes on, and its OpenMetrics endpoint."""

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from paceline.cli.runs import check_exists
from paceline.config import ConfigError
from paceline.diagnosis import diagnose
from paceline.diagnosis.wording import cause_name, checked_language, stage_name
from paceline.monitor.following import RunFollower, follow
from paceline.monitor.panel import panel
from paceline.monitor.server import MetricsServer
from paceline.monitor.snapshot import take_snapshot
from paceline.monitor.words import PANEL, Lang, say

_MAX_PORT = 65535
_DIAGNOSIS_SHARE = 9.0
"""Times a diagnosis's own seconds that pass before the next one."""


def watch(
    run: Annotated[Path, typer.Argument(help="Folder of a run, which may be running, finished or imported.")],
    once: Annotated[bool, typer.Option("--once", help="Print the run as it stands and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="With --once: JSON on standard output; else one line per change.")
    ] = False,
    serve: Annotated[
        int | None,
        typer.Option(
            help="Serve OpenMetrics on this port until interrupted; 0 takes a free one.", show_default=False
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address that --serve listens on.")] = "127.0.0.1",
    interval: Annotated[float, typer.Option(help="Seconds between looks at the files.")] = 1.0,
    lang: Annotated[str, typer.Option("--lang", help="Language of the panel: en or zh.")] = "en",
) -> None:
    """Follow a run: step, stages, bottleneck, throughput, memory, reward, alarms. Ends when the run does."""
    if interval <= 0:
        raise ConfigError("--interval", interval, "must be above 0", "1", zh="须大于 0")
    if serve is not None and not 0 <= serve <= _MAX_PORT:
        rule, zh = f"must be a port, from 0 to {_MAX_PORT}", f"须是端口号，从 0 到 {_MAX_PORT}"
        raise ConfigError("--serve", serve, rule, "9400", zh=zh)
    language = checked_language(lang)
    check_exists(run)
    follower = follow(run)
    viewer = _Viewer(follower, language)
    console = Console()
    if once:
        _print(viewer, follower, as_json, console)
        return
    with ExitStack() as stack:
        if serve is not None:
            server = stack.enter_context(MetricsServer(run, serve, host, "--serve"))
            print(f"metrics: {server.url}", file=sys.stderr, flush=True)
        if as_json or not console.is_terminal:
            _print_changes(viewer, follower, as_json, console, interval, is_endless=serve is not None)
        else:
            _show(viewer, follower, console, interval, is_endless=serve is not None)


class _Viewer:
    """The panel of a run with the diagnosis of its bottleneck.

    A diagnosis reads the whole run, so one is made at most after each step, and takes at most a tenth of the time.
    """

    def __init__(self, run: RunFollower, lang: Lang) -> None:
        self._run, self._lang = run, lang
        self._bottleneck: str | None = None
        self._step, self._not_before = 0, 0.0

    def panel(self) -> RenderableType:
        """The run as it stands."""
        snapshot = take_snapshot(self._run)
        begun = time.monotonic()
        if snapshot.step != self._step and begun >= self._not_before:
            self._bottleneck = _bottleneck_of(self._run.run_dir, self._lang)
            self._step = snapshot.step
            ended = time.monotonic()
            self._not_before = ended + _DIAGNOSIS_SHARE * (ended - begun)
        return panel(snapshot, self._bottleneck, self._lang, self._stage_name)

    def _stage_name(self, stage: str) -> str:
        """English readers see a stage as the records and settings have it."""
        return stage if self._lang == "en" else stage_name(stage, self._lang)


def _bottleneck_of(run_dir: Path, lang: Lang) -> str | None:
    """The diagnosis's bottleneck in words; None where the run has no finished step yet."""
    try:
        found = diagnose(run_dir).bottleneck
    except ConfigError:
        return None
    if found is None:
        return None
    stage = found.stage if lang == "en" else stage_name(found.stage, lang)
    if not found.is_measured:
        return stage
    return say(PANEL, "bottleneck-is", lang, stage=stage, cause=cause_name(found.kind, lang))


def _show(viewer: _Viewer, run: RunFollower, console: Console, interval_s: float, is_endless: bool) -> None:
    """The live panel; what stood last stays on the screen."""
    with Live(viewer.panel(), console=console, auto_refresh=False) as live:
        while is_endless or not run.has_ended:
            time.sleep(interval_s)
            run.poll()
            live.update(viewer.panel(), refresh=True)


def _print_changes(
    viewer: _Viewer,
    run: RunFollower,
    as_json: bool,
    console: Console,
    interval_s: float,
    is_endless: bool,
) -> None:
    """Where there is no terminal: the run as it stands, then again whenever its records grew."""
    _print(viewer, run, as_json, console)
    while is_endless or not run.has_ended:
        time.sleep(interval_s)
        if run.poll():
            _print(viewer, run, as_json, console)


def _print(viewer: _Viewer, run: RunFollower, as_json: bool, console: Console) -> None:
    if as_json:
        print(json.dumps(take_snapshot(run).as_dict()), flush=True)
    else:
        console.print(viewer.panel())
