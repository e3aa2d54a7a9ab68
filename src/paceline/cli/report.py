"""`paceline report`: a run's page, the comparison of two runs, or an ablation's page."""

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.config import ConfigError
from paceline.diagnosis.wording import checked_language


def write_reports(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
    lang: Annotated[str, typer.Option("--lang", help="Language of the page: en or zh.")] = "en",
) -> None:
    """Write a run's report as one HTML file, or print its figures."""
    language = checked_language(lang)
    check_run_folder(run)
    from paceline.report import report_figures, write_report

    if as_json:
        print(json.dumps(report_figures(run), indent=2))
    else:
        print(write_report(run, language))


def check_run_folder(run: Path) -> None:
    """Raises `ConfigError` unless `run` is the folder of a run."""
    if (run / "config.yaml").is_file():
        return
    rule = (
        "must be the folder of a run, which holds a config.yaml"
        if run.is_dir()
        else "there is no such folder"
    )
    parent = run if run.is_dir() else run.parent
    runs = sorted(path.parent for path in parent.glob("*/config.yaml")) if parent.is_dir() else []
    raise ConfigError("run", str(run), rule, ", ".join(str(path) for path in runs[-3:]) or None)
