"""Figures of the retrieval measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from bishop_ray.report.figures import Figure, colour, line, plot
from bishop_ray.report.page import Section, page
from bishop_ray.report.study_records import ReportTable

Rows = Sequence[Mapping[str, Any]]
RATES = (
    ("errors", "violated_all", "Retrieval error: all memories", "of pairs of draw and memory with sparse farther off"),
    ("errors", "violated_best", "Retrieval error: best match", "of draws with sparse farther off the best match"),
    ("iterations", "violated", "Updates until rest", "of draws in which sparse needs more updates"),
)
"""Table, column, title and meaning of the pictures of rates."""
CURVES = ("noise",)
"""Tables of hundreds of points, which only the pictures show."""


def theory_page(titles: Mapping[str, str], tables: Mapping[str, Rows], facts: Sequence[str]) -> str:
    """One self-contained HTML page.

    Args:
        titles: Name of a table -> what stands in it.
        tables: By name, as ``theory_cli.theory_tables`` makes them.
        facts: Lines below the heading.
    """
    figures = {
        "energy": [_rises(tables["energy"])],
        "errors": [_rate(tables, *entry) for entry in RATES if entry[0] == "errors"],
        "iterations": [
            *(_rate(tables, *entry) for entry in RATES if entry[0] == "iterations"),
            *_updates(tables["iterations"]),
        ],
        "noise": _noise(tables["noise"]),
    }
    sections = []
    for name, title in titles.items():
        short, frame = title.partition(":")[0], pd.DataFrame(tables[name])
        table = ReportTable(name, short, frame, (), dict.fromkeys(_numbers(tables[name]), 4))
        shown = () if name in CURVES else (table,)
        more = () if shown else (f"The numbers stand in {name}.csv.",)
        sections.append(Section(short, (title, *more), shown, tuple(figures.get(name, ()))))
    return page("Theory of memory retrieval, measured", facts, sections)


def _numbers(rows: Rows) -> list[str]:
    """Columns of results, which are shown with four decimals."""
    given = ("patterns", "alpha", "beta", "noise", "noise_in", "largest_rise")
    return [name for name in (rows[0] if rows else ()) if name not in given]


def _rises(rows: Rows) -> Figure:
    """How often the energy rises over beta: the largest share over all alphas and sizes."""
    traces = []
    words = {
        "rises": "1/beta before Psi* (here)",
        "rises_printed": "without 1/beta (printed)",
        "rises_printed_entropy": "entropy subtracted (printed)",
    }
    for i, (column, name) in enumerate(words.items()):
        worst: dict[float, float] = {}
        for row in rows:
            worst[row["beta"]] = max(worst.get(row["beta"], 0.0), 100 * row[column])
        traces.append(line(name, sorted(worst), [worst[beta] for beta in sorted(worst)], i, mode="lines+markers"))
    caption = "Percent of updates at which the energy rises; of all alphas and sizes the largest."
    return Figure("theory-energy", "The energy rises", caption, _over_beta("updates, percent", traces))


def _rate(tables: Mapping[str, Rows], table: str, column: str, title: str, meaning: str) -> Figure:
    traces, curves = [], dict.fromkeys((row["alpha"], row["patterns"]) for row in tables[table])
    for i, (alpha, patterns) in enumerate(curves):
        own = [r for r in tables[table] if (r["alpha"], r["patterns"]) == (alpha, patterns)]
        own.sort(key=lambda r: r["beta"])
        name = f"alpha {alpha:g}, {patterns} patterns"
        traces.append(line(name, [r["beta"] for r in own], [100 * r[column] for r in own], i, mode="lines+markers"))
    top = max(100 * row[column] for row in tables[table])
    figure = _over_beta("violated, percent", traces, top=102 if top > 20 else max(1.0, 1.2 * top))
    return Figure(f"theory-{table}-{column.replace('_', '-')}", title, f"Percent {meaning} than dense.", figure)


def _over_beta(y: str, traces: Sequence[go.Scatter], top: float = 102.0) -> go.Figure:
    figure = plot("beta", y, traces)
    figure.update_xaxes(type="log", dtick=1)
    figure.update_yaxes(range=[-0.02 * top, top])
    return figure


def _updates(rows: Rows) -> list[Figure]:
    """Mean updates over beta, sparse and dense: a picture per size."""
    figures = []
    for patterns in dict.fromkeys(row["patterns"] for row in rows):
        own = sorted((r for r in rows if r["patterns"] == patterns), key=lambda r: r["beta"])
        first = next(iter(dict.fromkeys(r["alpha"] for r in own)))
        dense = [r for r in own if r["alpha"] == first]
        traces = [line("alpha 1 (dense)", [r["beta"] for r in dense], [r["iterations_dense"] for r in dense], 0,
                       mode="lines+markers")]  # fmt: skip
        for i, alpha in enumerate(dict.fromkeys(r["alpha"] for r in own), 1):
            points = [r for r in own if r["alpha"] == alpha]
            traces.append(
                line(f"alpha {alpha:g}", [r["beta"] for r in points], [r["iterations"] for r in points], i,
                     mode="lines+markers")
            )  # fmt: skip
        figure = plot("beta", "updates", traces)
        figure.update_xaxes(type="log", dtick=1)
        figure.update_yaxes(type="log", dtick="D2")
        caption = "Mean number of updates until the state stands still."
        figures.append(
            Figure(f"theory-updates-{patterns}", f"Updates until rest, {patterns} patterns", caption, figure)
        )
    return figures


def _noise(rows: Rows) -> list[Figure]:
    """Mean distance over the length of the noise: a picture per place of the noise, size and beta."""
    figures = []
    keys = dict.fromkeys((row["noise_in"], row["patterns"], row["beta"]) for row in rows)
    for where, patterns, beta in keys:
        own = [r for r in rows if (r["noise_in"], r["patterns"], r["beta"]) == (where, patterns, beta)]
        traces = []
        for i, alpha in enumerate(dict.fromkeys(r["alpha"] for r in own)):
            points = [r for r in own if r["alpha"] == alpha]
            traces.append(
                line(f"alpha {alpha:g}", [r["noise"] for r in points], [r["error"] for r in points], i,
                     mode="lines+markers", marker={"color": colour(i), "size": 5})
            )  # fmt: skip
        title = f"Noise in the {where}, {patterns} patterns, beta {beta:g}"
        name = f"theory-noise-{where}-{patterns}-{beta:g}".replace(".", "-").replace("+", "")
        caption = "Mean distance of the retrieved state from the clean pattern after one update."
        figures.append(Figure(name, title, caption, plot("length of the noise", "distance", traces)))
    return figures
