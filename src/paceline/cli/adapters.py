"""Commands for users of other frameworks: `lint verl`, `translate verl`, `import verl|trl|trace|rows`.

Exit codes of `lint`: 0 nothing of severity error, 1 at least one error, 2 the input is no launch that can be read.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.adapters.run.imported import ImportedRun
from paceline.config import ConfigError
from paceline.types import STAGES

NO_ERRORS, ERRORS = 0, 1

_ANY_ARGUMENTS = {
    "ignore_unknown_options": True
}  # a command on the line brings options of its own, such as -m

lint_app = typer.Typer(help="Check a launch of another framework.", no_args_is_help=True)

Launch = Annotated[
    list[str],
    typer.Argument(help="A shell script, a command in quotes, or a command's words.", show_default=False),
]
Environment = Annotated[
    list[str] | None,
    typer.Option("--env", help="NAME=VALUE the script is started with; repeat it.", show_default=False),
]


@lint_app.callback()
def _lint() -> None:
    """Check a launch of another framework."""


@lint_app.command("verl", context_settings=_ANY_ARGUMENTS)
def lint_verl(
    launch: Launch,
    environment: Environment = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
) -> None:
    """Print a verl launch's batch arithmetic and what is wrong or slow about it. Exit code 1 when there is an error."""
    from paceline.adapters.verl.launch import read_launch
    from paceline.adapters.verl.lint import lint_launch, lint_record, lint_text

    checked = [(one, lint_launch(one)) for one in read_launch(launch, parse_environment(environment))]
    if as_json:
        print(json.dumps([lint_record(one, findings) for one, findings in checked], indent=2, default=str))
    else:
        print("\n\n".join(lint_text(one, findings) for one, findings in checked))
    has_errors = any(finding.severity == "error" for _, findings in checked for finding in findings)
    raise typer.Exit(ERRORS if has_errors else NO_ERRORS)


translate_app = typer.Typer(help="Another framework's launch as a recipe.", no_args_is_help=True)


@translate_app.callback()
def _translate() -> None:
    """Another framework's launch as a recipe."""


@translate_app.command("verl", context_settings=_ANY_ARGUMENTS)
def translate_verl(
    launch: Launch,
    environment: Environment = None,
    out: Annotated[Path | None, typer.Option(help="Where the recipe goes; default: standard output.")] = None,
) -> None:
    """Write a verl launch as a recipe; what has no counterpart is listed above it. Exit code 1 when the recipe needs
    more before it can start."""
    from paceline.adapters.verl.launch import read_launch
    from paceline.adapters.verl.translate import translate_launch

    launches = read_launch(launch, parse_environment(environment))
    if len(launches) > 1:
        print(f"{len(launches)} launches; the first is translated", file=sys.stderr)
    translation = translate_launch(launches[0])
    if out is None:
        print(translation.recipe, end="")
    else:
        out.write_text(translation.recipe, encoding="utf-8")
        print(
            "".join(line[2:] + "\n" for line in translation.recipe.splitlines() if line.startswith("# ")),
            end="",
        )
        print(f"recipe: {out}")
    raise typer.Exit(ERRORS if translation.problems else NO_ERRORS)


import_app = typer.Typer(help="Another framework's records as a run's folder.", no_args_is_help=True)

Source = Annotated[Path, typer.Argument(help="A file, or a folder that is searched.")]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="The run's new folder; default: runs/imported-NAME.", show_default=False),
]
RunName = Annotated[
    str | None, typer.Option("--name", help="Name of the run; default: the folder's.", show_default=False)
]


@import_app.callback()
def _import() -> None:
    """Another framework's records as a run's folder, for `paceline report`."""


@import_app.command("verl")
def import_verl_logs(
    path: Source,
    out: Out = None,
    name: RunName = None,
    mode: Annotated[
        str, typer.Option(help="What gen is. sync: generation; async: a wait; auto: as the log suggests.")
    ] = "auto",
) -> None:
    """Read verl's console log, JSONL file logger and TensorBoard files of one run."""
    from paceline.adapters.verl.importing import MODES, import_verl

    chosen = next((one for one in MODES if one == mode), None)
    if chosen is None:
        raise ConfigError("--mode", mode, f"must be one of {', '.join(MODES)}", "auto")
    _write(import_verl(path, chosen, name), out)


@import_app.command("trl")
def import_trl_logs(path: Source, out: Out = None, name: RunName = None) -> None:
    """Read TRL's trainer_state.json, event files or console output."""
    from paceline.adapters.trl.importing import import_trl

    _write(import_trl(path, name), out)


@import_app.command("trace")
def import_torch_traces(
    path: Source,
    out: Out = None,
    name: RunName = None,
    stage: Annotated[
        str | None,
        typer.Option(help="Stage of time in no named range; default: unaccounted.", show_default=False),
    ] = None,
) -> None:
    """Read torch-profiler traces (.json, .json.gz) of any framework: stages, causes and kernels by rank."""
    from paceline.adapters.traces.importing import causes_text, import_traces, write_profile

    if stage is not None and stage not in STAGES:
        raise ConfigError("--stage", stage, f"must be one of {', '.join(STAGES)}", "update_actor")
    run = import_traces(path, name, stage)
    folder = write_profile(run, out or Path("runs") / f"imported-{run.name}")
    print(causes_text(run))
    for note in run.notes:
        print(f"note: {note}")
    print(f"run: {folder}")


@import_app.command("rows")
def import_timeline_rows(path: Source, out: Out = None, name: RunName = None) -> None:
    """Read timeline rows (role, name, rank, begin, end) of RL-Insight: .csv, .jsonl, .json or .parquet."""
    from paceline.adapters.traces.timeline_rows import import_rows, write_rows

    run = import_rows(path, name)
    folder = write_rows(run, out or Path("runs") / f"imported-{run.name}")
    for note in run.notes:
        print(f"note: {note}")
    print(f"run: {folder}")


def _write(run: ImportedRun, out: Path | None) -> None:
    from paceline.adapters.run import write_run

    folder = write_run(run, out or Path("runs") / f"imported-{run.name}")
    for note in run.notes:
        print(f"note: {note}")
    print(f"run: {folder}")


def parse_environment(pairs: list[str] | None) -> dict[str, str]:
    """`NAME=VALUE` texts as a mapping. Raises `ConfigError` for one without an equals sign."""
    found: dict[str, str] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError("--env", pair, "is written NAME=VALUE", f"{pair}=VALUE")
        found[name] = value
    return found
