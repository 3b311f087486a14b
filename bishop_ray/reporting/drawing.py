"""What all figures share: size, colours, axes. Plotly draws them as SVG, which prints as sharply as text.

https://plotly.com/python/reference/layout/
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

WIDTH, HEIGHT = 620, 360
"""Pixels of a figure: the printed width of an A4 page, so that none is scaled."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Told apart by people with any colour vision (Okabe and Ito 2008), and in greys."""

DASHES = ("solid", "dash", "dot", "dashdot")
GRID = "#e3e3e3"


@dataclass(frozen=True)
class Figure:
    """One picture.

    Attributes:
        name: Unique in the report, letters, digits and dashes.
        title: Above it.
        caption: Below it: what is to be seen.
        plot: For Plotly.
    """

    name: str
    title: str
    caption: str
    plot: go.Figure

    def json(self) -> str:
        """Data and layout as JSON that can stand inside an HTML script element."""
        whole = json.loads(self.plot.to_json())
        text = json.dumps({"data": whole["data"], "layout": whole["layout"]}, separators=(",", ":"))
        return text.replace("<", "\\u003c")


def safe(text: str) -> str:
    """A name for a label: Plotly reads tags in labels."""
    return html.escape(text, quote=False)


def colour(index: int) -> str:
    """Of the line at a position; repeats after the last."""
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> str:
    """Tells lines apart whose colours repeat."""
    return DASHES[index // len(COLOURS) % len(DASHES)]


def plot(x: str, y: str, traces: Sequence[Any] = (), height: int = HEIGHT, **layout: Any) -> go.Figure:
    """A figure with titled axes.

    Args:
        x: Title of the horizontal axis.
        y: Title of the vertical axis.
        traces: Plotly's.
        height: In pixels.
        layout: Further settings of Plotly's layout.
    """
    figure = go.Figure(data=list(traces))
    axis = {"gridcolor": GRID, "linecolor": "#888", "ticks": "outside", "tickcolor": "#888", "zeroline": False,
            "automargin": True}  # fmt: skip
    figure.update_layout(
        template="none",
        width=WIDTH,
        height=height,
        margin={"l": 55, "r": 15, "t": 10, "b": 45},
        font={"family": "system-ui, sans-serif", "size": 12, "color": "#222"},
        paper_bgcolor="white",
        plot_bgcolor="white",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "font": {"size": 11}},
        xaxis={**axis, "title": {"text": safe(x), "standoff": 8}},
        yaxis={**axis, "title": {"text": safe(y), "standoff": 8}},
        hovermode="closest",
    )
    figure.update_layout(**layout)
    return figure


def whole_numbers(figure: go.Figure, last: int) -> go.Figure:
    """The figure with ticks at whole numbers only on its horizontal axis, which ends at `last`."""
    figure.update_xaxes(
        tick0=0, dtick=next(step for step in (1, 2, 5, 10, 20, 50, 100, 500, 10**6) if last <= 12 * step)
    )
    return figure


def line(name: str, x: Sequence[float], y: Sequence[float], index: int, **more: Any) -> go.Scatter:
    """A line of the colour at `index`."""
    style = {"color": colour(index), "dash": dash(index), "width": 1.8, **more.pop("line", {})}
    return go.Scatter(x=list(x), y=list(y), name=safe(name), mode=more.pop("mode", "lines"), line=style, **more)
