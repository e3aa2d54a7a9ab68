"""`paceline report`: a run's page, the comparison of two runs, or an ablation's page."""

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.runs import check_run_folder
from paceline.diagnosis.wording import checked_language


def write_reports(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of an ablation.")],
    against: Annotated[
        Path | None, typer.Argument(help="A second run, to compare with the first.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
    lang: Annotated[str, typer.Option("--lang", help="Language of the page: en or zh.")] = "en",
) -> None:
    """Write a run's report as one HTML file, or print its figures; of two runs, write their comparison."""
    language = checked_language(lang)
    from paceline.lab.results import ABLATION_FILE
    from paceline.report import report_figures, write_ablation_report, write_comparison, write_report

    if against is None and not as_json and (run / ABLATION_FILE).is_file():
        print(write_ablation_report(run, language))
        return
    for folder in (run, against):
        if folder is not None:
            check_run_folder(folder)
    if as_json:
        figures = [report_figures(folder) for folder in (run, against) if folder is not None]
        print(json.dumps(figures[0] if against is None else figures, indent=2))
    elif against is None:
        print(write_report(run, language))
    else:
        print(write_comparison(run, against, language))
