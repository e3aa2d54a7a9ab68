"""`paceline trace RUN`: every rank's spans, causes and device counters as one file for ui.perfetto.dev."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.runs import check_exists
from paceline.config import ConfigError
from paceline.telemetry.trace import TRACE_FILE, write_trace


def trace_run(
    run: Annotated[Path, typer.Argument(help="Folder of a run, also of an imported one.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help=f"File; default: {TRACE_FILE} in the run's folder.", show_default=False),
    ] = None,
) -> None:
    """Write a run's timeline in the Trace Event Format, for ui.perfetto.dev or chrome://tracing."""
    check_exists(run)
    try:
        print(write_trace(run, out))
    except FileNotFoundError as error:
        raise ConfigError("run", str(run), f"holds no ledger ({error})") from error
