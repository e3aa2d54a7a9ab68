"""Commands and exit codes: 0 done, 1 failed while running, 2 refused before starting.

Only what a command needs is imported, and only when it runs: `--help`, `config` and `--dry-run` answer without
torch.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.ablate import ablate_recipe
from paceline.cli.adapters import import_app, lint_app, translate_app
from paceline.cli.bench import bench_app
from paceline.cli.diagnose import diagnose_run
from paceline.cli.endings import (
    DONE,
    FAILED,
    REFUSED,
    asked_language,
    failure,
    own_placement,
    refusal,
    speaks_for_the_run,
)
from paceline.cli.explain import explain_run
from paceline.cli.profile import profile_recipe
from paceline.cli.report import write_reports
from paceline.cli.serve import serve
from paceline.cli.trace import trace_run
from paceline.cli.watch import watch
from paceline.config import (
    ConfigError,
    describe,
    describe_sft,
    explain,
    load_config,
    load_sft_config,
    require_command,
)
from paceline.config.engine_advice import engine_advice
from paceline.planner.dry_run import describe_memory

app = typer.Typer(
    help="LLM reinforcement-learning post-training that is fast by construction and explains itself.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(lint_app, name="lint")
app.add_typer(translate_app, name="translate")
app.add_typer(import_app, name="import")
app.add_typer(bench_app, name="bench")

Recipe = Annotated[str, typer.Argument(help="YAML recipe; settings are also given as section.key=value.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings: section.key=value ...", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]


@app.command()
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check the settings, print the batch arithmetic, start nothing. Files: paceline doctor RECIPE.",
        ),
    ] = False,
) -> None:
    """Train a model as the recipe says."""
    config = load_config(*split_recipe(recipe, overrides or []))
    require_command(config, "train")
    if dry_run:
        print(describe(config))
        print(describe_memory(config))
        for advice in engine_advice(config, on_cpu=config.cluster.device == "cpu"):
            print(f"advice: {advice}")
        return
    from paceline.api import start_training

    run = start_training(config)
    if speaks_for_the_run(own_placement()):
        print(f"run: {run.dir}")


@app.command()
def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, count the rows, start nothing.")
    ] = False,
) -> None:
    """Fine-tune a model on conversations, or on prompts with their answers."""
    config = load_sft_config(*split_recipe(recipe, overrides or []))
    if dry_run:
        from paceline.data.demonstrations import read_demonstrations

        rows = read_demonstrations(config)
        print(describe_sft(config, len(rows.train), len(rows.evaluation)))
        print(describe_memory(config))
        return
    from paceline.api import start_sft

    run = start_sft(config)
    if speaks_for_the_run(own_placement()):
        print(f"run: {run.dir}")


@app.command()
def doctor(
    recipe: Annotated[str | None, typer.Argument(help="Recipe to check as well.", show_default=False)] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure matrix products, copies, a collective and the disk, and keep the figures.",
        ),
    ] = False,
) -> None:
    """Check this machine, and a recipe if given, without loading a model. Exit code 2 when a check fails."""
    from paceline.cli.checks import FAIL
    from paceline.cli.doctor import examine, print_checks

    asked = (None, []) if recipe is None else split_recipe(recipe, overrides or [])
    checks = examine(*asked, measure=measure)
    if as_json:
        print(json.dumps([check.as_dict() for check in checks], indent=2))
    else:
        print_checks(checks)
    if any(check.status == FAIL for check in checks):
        raise typer.Exit(REFUSED)


@app.command("config")
def list_settings(
    explain_all: Annotated[
        bool, typer.Option("--explain", help="With type and meaning of every setting.")
    ] = False,
) -> None:
    """List all settings with their defaults."""
    for name, kind, default, description in explain():
        print(f"{name} = {default}")
        if explain_all:
            print(f"    {kind}\n    {description}\n")


# registered here so that `paceline --help` lists first what a person does first
app.command("report")(write_reports)
app.command("profile")(profile_recipe)
app.command("diagnose")(diagnose_run)
app.command("ablate")(ablate_recipe)
app.command("explain")(explain_run)
app.command("watch")(watch)
app.command("trace")(trace_run)
app.command("serve")(serve)


def split_recipe(recipe: str, overrides: Sequence[str]) -> tuple[str | None, list[str]]:
    """A first argument that is written section.key=value is a setting, not a file: a run needs no recipe file."""
    if "=" in recipe and not Path(recipe).exists():
        return None, [recipe, *overrides]
    return recipe, list(overrides)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; whatever went wrong is on the last lines of standard error."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(args=given)
    except ConfigError as error:
        return refusal(error, own_placement(), asked_language(given))
    except (
        SystemExit
    ) as stop:  # typer's way to end: 0 after a command, 2 after a usage error, 1 when interrupted
        return stop.code if isinstance(stop.code, int) else FAILED
    except Exception as error:  # the outermost frame: everything else means the run failed, and says why
        return failure(error, own_placement(), asked_language(given))
    return DONE
