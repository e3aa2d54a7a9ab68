"""Records to report.html: one file that holds its charts' library, opens offline and asks no server for anything."""

import base64
import gzip
import hashlib
import json
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from paceline.files import write_whole
from paceline.lab.results import read_ablation
from paceline.report.ablation_page import build_ablation
from paceline.report.blocks import Page
from paceline.report.compare_page import build_comparison
from paceline.report.page import build_page
from paceline.report.palette import css_variables, dark_by_light
from paceline.report.run_data import load_run
from paceline.report.theme import Chart
from paceline.report.words import Lang, Words

REPORT_FILE = "report.html"
COMPARISON_FILE = "comparison.html"

_LIGHT_PAGE = "--page: #f6f7f9; --on-stage: #ffffff; --good: #0b6e60; --bad: #b32b2b;"
_DARK_PAGE = "--page: #0f1217; --on-stage: #11151b; --good: #5fd0bc; --bad: #ff8d8d;"


def write_report(run_dir: Path, lang: Lang = "en") -> Path:
    """Writes `report.html` into the run's folder and returns its path. An earlier one is replaced at once.

    Raises:
        FileNotFoundError: `run_dir` is not the folder of a run.
        ValueError: a record is of a version this paceline does not read.
    """
    run, words = load_run(run_dir), Words(lang)
    return write_page(build_page(run, words), run.run_dir / REPORT_FILE, words)


def write_comparison(first: Path, second: Path, lang: Lang = "en", path: Path | None = None) -> Path:
    """Writes the comparison of two runs, into the second's folder unless a `path` is given, and returns its path.

    Raises:
        FileNotFoundError: one of them is not the folder of a run.
        ValueError: a record is of a version this paceline does not read.
    """
    words = Words(lang)
    runs = load_run(first), load_run(second)
    return write_page(build_comparison(*runs, words), path or runs[1].run_dir / COMPARISON_FILE, words)


def write_ablation_report(folder: Path, lang: Lang = "en") -> Path:
    """Writes `report.html` beside an ablation's record and returns its path.

    Raises:
        FileNotFoundError: there is no ablation in the folder.
        ValueError: its record is of a version this paceline does not read.
    """
    words = Words(lang)
    return write_page(build_ablation(read_ablation(folder), words), folder / REPORT_FILE, words)


def write_page(page: Page, path: Path, words: Words) -> Path:
    """Writes a page and returns its path."""
    write_whole(path, render(page, words))
    return path


def render(page: Page, words: Words) -> str:
    """The page as HTML. Every text of the run is escaped; only the parts of this package are taken as they are."""
    environment = Environment(
        loader=PackageLoader("paceline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    (packed, plotly_digest), script = packed_plotly(), _part(environment, "report.js")
    return environment.get_template("report.html.j2").render(
        page=page,
        words=words,
        style=Markup(_style(_part(environment, "report.css"))),
        plotly_packed=Markup(packed),
        page_script=Markup(script),
        chart_data=Markup(_chart_data(page.charts)),
        dark_colours=Markup(json.dumps(dark_by_light())),
        content_policy=_content_policy(plotly_digest, digest(script)),
    )


def _part(environment: Environment, name: str) -> str:
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def _style(rules: str) -> str:
    light = f":root {{ {css_variables(dark=False)} {_LIGHT_PAGE} }}"
    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {css_variables(dark=True)} {_DARK_PAGE} }} }}"
    return f"\n{light}\n{dark}\n{rules}"


def _chart_data(charts: list[Chart]) -> str:
    """The charts as a JSON list that may stand inside a script element."""
    return "[" + ",\n".join(chart.payload() for chart in charts) + "]"


@lru_cache(maxsize=1)
def packed_plotly() -> tuple[str, str]:
    """The charts' library, compressed to a third as text that a page can hold, and the digest of what unpacks."""
    plotly = get_plotlyjs()
    packed = gzip.compress(plotly.encode(), compresslevel=9, mtime=0)
    return base64.b64encode(packed).decode(), digest(plotly)


def digest(script: str) -> str:
    """A script's digest as a content policy states it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _content_policy(*digests: str) -> str:
    """Lets exactly these scripts run and forbids every request, so that nothing a model wrote can do either."""
    allowed = " ".join(f"'{known}'" for known in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
