"""`paceline explain RUN`: a run in half a page of plain words."""

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.runs import check_run_folder
from paceline.diagnosis.wording import checked_language
from paceline.explanation.explain import checked_audience, explain


def explain_run(
    run: Annotated[Path, typer.Argument(help="Folder of a run, also of an imported one.")],
    against: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a run to compare with: what changed, and which wait went.", show_default=False
        ),
    ] = None,
    lang: Annotated[str, typer.Option("--lang", help="Language of the text: en or zh.")] = "en",
    audience: Annotated[str, typer.Option("--for", help="Reader: engineer or manager.")] = "engineer",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: the paragraphs, and every figure in them.")
    ] = False,
) -> None:
    """Say in plain words how long a step takes, on what, whether ranks are balanced, and what it waits for."""
    check_run_folder(run)
    if against is not None:
        check_run_folder(against, "--against")
    found = explain(run, against, checked_language(lang), checked_audience(audience))
    print(json.dumps(found.as_dict(), indent=2, ensure_ascii=False) if as_json else found.text)
