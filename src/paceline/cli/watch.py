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
from paceline.diagnosis.wording import cause_name
from paceline.monitor.following import RunFollower, follow
from paceline.monitor.panel import panel
from paceline.monitor.server import MetricsServer
from paceline.monitor.snapshot import take_snapshot

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
) -> None:
    """Follow a run: step, stages, bottleneck, throughput, memory, reward, alarms. Ends when the run does."""
    if interval <= 0:
        raise ConfigError("--interval", interval, "must be above 0", "1")
    if serve is not None and not 0 <= serve <= _MAX_PORT:
        raise ConfigError("--serve", serve, f"must be a port, from 0 to {_MAX_PORT}", "9400")
    check_exists(run)
    follower = follow(run)
    console = Console()
    if once:
        _print(_Viewer(follower), follower, as_json, console)
        return
    with ExitStack() as stack:
        if serve is not None:
            server = stack.enter_context(MetricsServer(run, serve, host, "--serve"))
            print(f"metrics: {server.url}", file=sys.stderr, flush=True)
        if as_json or not console.is_terminal:
            _print_changes(follower, as_json, console, interval, is_endless=serve is not None)
        else:
            _show(follower, console, interval, is_endless=serve is not None)


class _Viewer:
    """The panel of a run with the diagnosis of its bottleneck.

    A diagnosis reads the whole run, so one is made at most after each step, and takes at most a tenth of the time.
    """

    def __init__(self, run: RunFollower) -> None:
        self._run = run
        self._bottleneck: str | None = None
        self._step, self._not_before = 0, 0.0

    def panel(self) -> RenderableType:
        """The run as it stands."""
        snapshot = take_snapshot(self._run)
        begun = time.monotonic()
        if snapshot.step != self._step and begun >= self._not_before:
            self._bottleneck = _bottleneck_of(self._run.run_dir)
            self._step = snapshot.step
            ended = time.monotonic()
            self._not_before = ended + _DIAGNOSIS_SHARE * (ended - begun)
        return panel(snapshot, self._bottleneck)


def _bottleneck_of(run_dir: Path) -> str | None:
    """The diagnosis's bottleneck in words; None where the run has no finished step yet."""
    try:
        found = diagnose(run_dir).bottleneck
    except ConfigError:
        return None
    return None if found is None else f"{found.stage}, bound by {cause_name(found.kind, 'en')}"


def _show(run: RunFollower, console: Console, interval_s: float, is_endless: bool) -> None:
    """The live panel; what stood last stays on the screen."""
    viewer = _Viewer(run)
    with Live(viewer.panel(), console=console, auto_refresh=False) as live:
        while is_endless or not run.has_ended:
            time.sleep(interval_s)
            run.poll()
            live.update(viewer.panel(), refresh=True)


def _print_changes(
    run: RunFollower, as_json: bool, console: Console, interval_s: float, is_endless: bool
) -> None:
    """Where there is no terminal: the run as it stands, then again whenever its records grew."""
    viewer = _Viewer(run)
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
