"""`paceline diagnose RUN`: the bottleneck, the waits, what stands out and what would help, as text or JSON."""

import json
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.runs import check_run_folder
from paceline.diagnosis import diagnose
from paceline.diagnosis.features import add_features
from paceline.diagnosis.text import diagnosis_text
from paceline.diagnosis.wording import checked_language


def diagnose_run(
    run: Annotated[Path, typer.Argument(help="Folder of a run, also of an imported one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")] = False,
    lang: Annotated[str, typer.Option("--lang", help="Language of the text: en or zh.")] = "en",
    features: Annotated[
        Path | None,
        typer.Option(
            "--features", help="Feature records of your own, as in features.yaml.", show_default=False
        ),
    ] = None,
) -> None:
    """Say what bounds a run, what it waits for, what stands out, and which settings would help by how much."""
    language = checked_language(lang)
    check_run_folder(run)
    if features is not None:
        add_features(features)
    found = diagnose(run)
    print(json.dumps(found.as_dict(), indent=2) if as_json else diagnosis_text(found, language))
