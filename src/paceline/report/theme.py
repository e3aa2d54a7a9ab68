"""Shared look of the charts: one Plotly template in the page's light colours, which the page maps to dark ones."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from paceline.report.palette import ACCENT, GRID, INK, MUTED, SECOND, SURFACE

FONT = (
    'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", "PingFang SC", '
    '"Microsoft YaHei", "Noto Sans CJK SC", sans-serif'
)


@dataclass(frozen=True, slots=True)
class Variant:
    """Another figure in the same place, behind a button with this label."""

    label: str
    figure: go.Figure
    height: int

    def payload(self) -> str:
        """Height and figure as JSON."""
        return f'{{"height": {self.height}, "figure": {self.figure.to_json()}}}'


@dataclass(frozen=True, slots=True)
class LegendPart:
    """A colour of a chart, as CSS, and what it stands for."""

    colour: str
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure with its place on the page: `key` names its element, `height` is in pixels.

    With `variants` the first of them is `figure`; the page shows one at a time. `legend` stands above the chart where
    its own would not say enough.
    """

    key: str
    title: str
    caption: str
    figure: go.Figure
    height: int = 220
    zooms: bool = False
    variants: tuple[Variant, ...] = ()
    legend: tuple[LegendPart, ...] = ()

    def payload(self) -> str:
        """Key, height and figure as JSON that may stand inside a script element."""
        head = json.dumps({"key": self.key, "height": self.height, "zooms": self.zooms})
        variants = ", ".join(["null", *(variant.payload() for variant in self.variants[1:])])
        text = f'{head[:-1]}, "figure": {self.figure.to_json()}, "variants": [{variants}]}}'
        return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def chart_of_variants(
    key: str, title: str, caption: str, variants: Sequence[Variant], legend: Sequence[LegendPart] = ()
) -> Chart | None:
    """A chart with a button for each variant (none for a single one); None without any."""
    if not variants:
        return None
    first = variants[0]
    shown = tuple(variants) if len(variants) > 1 else ()
    return Chart(key, title, caption, first.figure, first.height, True, shown, tuple(legend))


def _axis() -> dict[str, Any]:
    return {
        "gridcolor": GRID.light,
        "linecolor": GRID.light,
        "zerolinecolor": GRID.light,
        "tickcolor": GRID.light,
        "tickfont": {"color": MUTED.light, "size": 11},
        "title": {"font": {"color": MUTED.light, "size": 11}, "standoff": 6},
        "automargin": True,
    }


TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": FONT, "size": 12, "color": INK.light},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "colorway": [ACCENT.light, SECOND.light],
        "margin": {"l": 44, "r": 10, "t": 8, "b": 34},
        "xaxis": _axis() | {"showgrid": False, "ticks": "outside", "ticklen": 4},
        "yaxis": _axis() | {"zeroline": False, "ticklabelstandoff": 3},
        "hoverlabel": {
            "bgcolor": SURFACE.light,
            "bordercolor": GRID.light,
            "font": {"family": FONT, "size": 12, "color": INK.light},
            "align": "left",
        },
        "legend": {
            "orientation": "h",
            "x": 1,
            "xanchor": "right",
            "y": 1.02,
            "yanchor": "bottom",
            "font": {"size": 11, "color": MUTED.light},
            "bgcolor": "rgba(0,0,0,0)",
        },
        "bargap": 0.12,
        "showlegend": False,
        "dragmode": "zoom",
    }
)


_FEW_STEPS = 10


def number_steps(figure: go.Figure, first: float, last: float, title: str) -> None:
    """Labels the horizontal axis with steps; of a few, with every one, since there is no step 1.5."""
    figure.update_xaxes(title_text=title, title_standoff=2)
    if last - first < _FEW_STEPS:
        figure.update_xaxes(dtick=1)


def new_figure(**layout: Any) -> go.Figure:
    """An empty figure in the shared look; one with a legend leaves room for it above."""
    if layout.get("showlegend"):
        layout["margin"] = {"t": 26}
    return go.Figure(layout=go.Layout(template=TEMPLATE, **layout))
