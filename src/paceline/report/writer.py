"""Records to report.html: one file that holds its charts' library, opens offline and asks no server for anything."""

import base64
import hashlib
import json
import os
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from paceline.report.page import Page, build_page
from paceline.report.palette import css_variables, dark_by_light
from paceline.report.run_data import load_run
from paceline.report.theme import Chart

REPORT_FILE = "report.html"

_LIGHT_PAGE = "--page: #f6f7f9; --on-stage: #ffffff; --good: #0b6e60; --bad: #b32b2b;"
_DARK_PAGE = "--page: #0f1217; --on-stage: #11151b; --good: #5fd0bc; --bad: #ff8d8d;"


def write_report(run_dir: Path) -> Path:
    """Writes `report.html` into the run's folder and returns its path. An earlier one is replaced at once.

    Raises:
        FileNotFoundError: `run_dir` is not the folder of a run.
        ValueError: a record is of a version this paceline does not read.
    """
    run = load_run(run_dir)
    path = run.run_dir / REPORT_FILE
    aside = path.with_suffix(".html.tmp")
    aside.write_text(render(build_page(run)), encoding="utf-8")
    os.replace(aside, path)
    return path


def render(page: Page) -> str:
    """The page as HTML. Every text of the run is escaped; only the parts of this package are taken as they are."""
    environment = Environment(
        loader=PackageLoader("paceline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    plotly, script = get_plotlyjs(), _part(environment, "report.js")
    return environment.get_template("report.html.j2").render(
        page=page,
        style=Markup(_style(_part(environment, "report.css"))),
        plotly_script=Markup(plotly),
        page_script=Markup(script),
        chart_data=Markup(_chart_data(page.charts)),
        dark_colours=Markup(json.dumps(dark_by_light())),
        content_policy=_content_policy(plotly, script),
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


def _content_policy(*scripts: str) -> str:
    """Lets exactly these scripts run and forbids every request, so that nothing a model wrote can do either."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
