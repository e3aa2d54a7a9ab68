"""Shared look of the charts: one Plotly template in the page's light colours, which the page maps to dark ones."""

import json
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from paceline.report.palette import ACCENT, GRID, INK, MUTED, SECOND, SURFACE

FONT = (
    'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", "PingFang SC", '
    '"Microsoft YaHei", "Noto Sans CJK SC", sans-serif'
)


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure with its place on the page: `key` names its element, `height` is in pixels."""

    key: str
    title: str
    caption: str
    figure: go.Figure
    height: int = 220
    zooms: bool = False

    def payload(self) -> str:
        """Key, height and figure as JSON that may stand inside a script element."""
        head = json.dumps({"key": self.key, "height": self.height, "zooms": self.zooms})
        text = f'{head[:-1]}, "figure": {self.figure.to_json()}}}'
        return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


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
