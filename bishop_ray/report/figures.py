"""Figures of a search: history, parallel coordinates, curves.

https://plotly.com/python/reference/layout/
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from bishop_ray.report.study_records import COMPLETE, EARLY, FAILED, Study, Trial
from bishop_ray.report.tables import shown
from bishop_ray.search.importance import numbers

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


SYMBOLS = {COMPLETE: "circle", EARLY: "x-thin", FAILED: "triangle-down-open"}
LINES = 300
"""Most trials drawn in parallel coordinates; of more, the best and an even choice of the others."""


def figure_name(*parts: str) -> str:
    """An identifier of a figure."""
    return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")


def labels(studies: Sequence[Study]) -> list[str]:
    """Model, with the seed where a model has several studies."""
    models = [study.model for study in studies]
    return [s.model if models.count(s.model) == 1 else f"{s.model}, seed {s.seed}" for s in studies]


def best_over_trials(dataset: str, studies: Sequence[Study]) -> Figure:
    """Best validation score so far by ended trials, each trial's own score marked by how it ended."""
    traces: list[go.Scatter] = []
    for i, (study, label) in enumerate(zip(studies, labels(studies), strict=True)):
        ended = sorted((t for t in study.trials if t.state in SYMBOLS), key=lambda t: (t.end, t.number))
        own = [shown(study.metric, t.score) if math.isfinite(t.score) else None for t in ended]
        best = _running_best(study.metric, [t.score for t in ended])
        places = list(range(1, len(ended) + 1))
        traces.append(line(label, places, best, i, line={"shape": "hv"}, legendgroup=label))
        for state, symbol in SYMBOLS.items():
            chosen = [j for j, t in enumerate(ended) if t.state == state and own[j] is not None]
            marker = {"symbol": symbol, "size": 7, "color": colour(i), "line": {"color": colour(i), "width": 1.5}}
            traces.append(
                go.Scatter(x=[places[j] for j in chosen], y=[own[j] for j in chosen], mode="markers", marker=marker,
                           text=[f"trial {ended[j].number}: {ended[j].reason}" for j in chosen], opacity=0.75,
                           legendgroup=label, showlegend=False, name=safe(f"{label}, {state}"))
            )  # fmt: skip
    failed = sum(study.count(FAILED) for study in studies)
    last = max((len(study.trials) for study in studies), default=1)
    caption = (
        "Line: best validation score so far, trials in the order in which they ended. Circles: trials that ran to "
        "their end; crosses: stopped early." + (f" Failed, without a score: {failed}." if failed else "")
    )
    metric = studies[0].metric
    return Figure(
        figure_name("best-trials", dataset),
        "Best so far, by trials",
        caption,
        whole_numbers(plot("ended trials", metric, traces), last),
    )


def best_over_time(dataset: str, studies: Sequence[Study]) -> Figure:
    """Best validation score so far by minutes since a study's first trial began, every epoch of every trial counted."""
    traces: list[go.Scatter] = []
    for i, (study, label) in enumerate(zip(studies, labels(studies), strict=True)):
        began = min((t.start for t in study.trials if t.start), default=0)
        points = sorted((p.time, p.value) for t in study.trials if t.state != FAILED for p in t.course)
        minutes = [(time - began) / 6e4 for time, _ in points]
        best = _running_best(study.metric, [value for _, value in points])
        traces.append(line(label, minutes, best, i, line={"shape": "hv"}, legendgroup=label))
        stopped = [t for t in study.trials if t.state == EARLY and math.isfinite(t.score)]
        marker = {"symbol": "x-thin", "size": 7, "line": {"color": colour(i), "width": 1.5}}
        traces.append(
            go.Scatter(x=[(t.end - began) / 6e4 for t in stopped], y=[shown(study.metric, t.score) for t in stopped],
                       mode="markers", marker=marker, opacity=0.75, legendgroup=label, showlegend=False,
                       text=[f"trial {t.number}: {t.reason}" for t in stopped], name=safe(f"{label}, {EARLY}"))
        )  # fmt: skip
    caption = "Line: best validation score that any epoch of any trial had reached. Crosses: where a trial was stopped."
    return Figure(
        figure_name("best-time", dataset),
        "Best so far, over time",
        caption,
        plot("minutes since the first trial began", studies[0].metric, traces, xaxis_rangemode="tozero"),
    )


def survival(dataset: str, studies: Sequence[Study]) -> Figure | None:
    """Share of trials that early stopping had left alive, by epoch; None where no study stopped any."""
    traces = []
    for i, (study, label) in enumerate(zip(studies, labels(studies), strict=True)):
        ended = [t for t in study.trials if t.state in (COMPLETE, EARLY)]
        last = max((t.epochs for t in ended), default=0)
        if study.params.get("scheduler") == "none" or last < 1:
            continue
        epochs = list(range(1, last + 1))
        alive = [1 - sum(t.state == EARLY and t.epochs < epoch for t in ended) / len(ended) for epoch in epochs]
        traces.append(line(label, epochs, alive, i, line={"shape": "hv"}, mode="lines+markers", marker={"size": 4}))
    if not any(study.count(EARLY) for study in studies) or not traces:
        return None
    caption = (
        "Share of the trials that had not been stopped before this epoch (ASHA; Li et al. 2020). Trials that ended by "
        "themselves, by patience or at the last epoch, count as alive; failed ones are left out."
    )
    figure = plot("epoch", "share of trials alive", traces, yaxis_range=[0, 1.03])
    whole_numbers(figure, max(int(trace.x[-1]) for trace in traces))
    return Figure(figure_name("survival", dataset), "Survival under early stopping", caption, figure)


def parallel(study: Study) -> Figure | None:
    """Parallel coordinates of the searched hyperparameters; None with fewer than two trials or nothing that varies."""
    trials = _chosen([t for t in study.trials if math.isfinite(t.score)])
    names = [k.removeprefix("space.") for k in study.params if k.startswith("space.")]
    names = [name for name in names if len({t.params.get(name) for t in trials}) > 1]
    if len(trials) < 2 or not names:
        return None
    axes = {name: _axis([t.params.get(name, "") for t in trials], study.params[f"space.{name}"]) for name in names}
    scores = np.array([shown(study.metric, t.score) for t in trials])
    low, high = float(scores.min()), float(scores.max())
    spread = (high - low) or 1.0
    quality = np.array([t.score for t in trials])
    order = np.argsort(quality)
    shades = sample_colorscale("Viridis_r", ((quality - quality.min()) / (np.ptp(quality) or 1.0)).tolist())
    places = list(range(len(names) + 1))
    traces = [
        go.Scatter(
            x=places, y=[*(axes[n].at[row] for n in names), (scores[row] - low) / spread], mode="lines",
            line={"color": shades[row], "width": 3 if row == order[-1] else 1}, opacity=1 if row == order[-1] else 0.55,
            showlegend=False, name=f"trial {trials[row].number}", text=f"{scores[row]:.2f}", hoverinfo="name+text",
        )
        for row in order
    ]  # fmt: skip
    figure = plot("", "", traces, height=400, margin={"l": 75, "r": 45, "t": 15, "b": 90})
    for place, name in enumerate(names):
        _label_axis(figure, place, axes[name].ticks)
    _label_axis(figure, len(names), [(0.0, f"{low:.4g}"), (1.0, f"{high:.4g}")])
    titles = [*(safe(name.partition(".")[2]) for name in names), f"<b>{study.metric}</b>"]
    figure.update_xaxes(tickvals=places, ticktext=titles, tickangle=-35, showgrid=False, ticks="",
                        range=[-0.3, len(names) + 0.5])  # fmt: skip
    figure.update_yaxes(visible=False, range=[-0.06, 1.06])
    caption = (
        f"A line per trial ({len(trials)} of {len(study.trials)}) through the values of what was searched to its "
        "validation score; darker is better, thick: the best. Trials that were stopped early end at the score they had."
    )
    return Figure(figure_name("parallel", study.name), f"Hyperparameters of {study.name}", caption, figure)


class _Axis:
    """Where values stand on one axis, from 0 to 1, and its labels."""

    def __init__(self, at: list[float], ticks: list[tuple[float, str]]) -> None:
        self.at, self.ticks = at, ticks


def _axis(values: Sequence[str], space: str) -> _Axis:
    found = numbers(values)
    distinct = sorted(set(values)) if found is None else sorted(set(values), key=float)
    if found is None or space.startswith("{"):  # choices stand side by side
        steps = {value: i / max(1, len(distinct) - 1) for i, value in enumerate(distinct)}
        return _Axis([steps[value] for value in values], [(steps[value], value) for value in distinct])
    scaled = np.log(found) if space.startswith("log ") and min(found) > 0 else np.array(found)
    low, high = float(scaled.min()), float(scaled.max())
    place = ((scaled - low) / (high - low)).tolist()
    return _Axis(place, [(0.0, _short(min(found))), (1.0, _short(max(found)))])


def _short(value: float) -> str:
    """Few letters: 0.2, 5e-4."""
    text = f"{value:.2g}"
    return text if len(text) <= 4 else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def _label_axis(figure: go.Figure, place: int, ticks: Sequence[tuple[float, str]]) -> None:
    figure.add_shape(type="line", x0=place, x1=place, y0=0, y1=1, line={"color": "#999", "width": 1})
    for height, text in ticks:
        figure.add_annotation(x=place, y=height, text=safe(text[:12]), showarrow=False, xanchor="left", xshift=3,
                              font={"size": 10}, bgcolor="rgba(255,255,255,0.75)", borderpad=0)  # fmt: skip


def _chosen(trials: Sequence[Trial]) -> list[Trial]:
    if len(trials) <= LINES:
        return list(trials)
    ordered = sorted(trials, key=lambda t: -t.score)
    half = LINES // 2
    return ordered[:half] + [ordered[int(i)] for i in np.linspace(half, len(ordered) - 1, LINES - half)]


def layers(study: Study, kind: str) -> Figure | None:
    """Alpha per layer ("alpha"), or the share of non-zero weights ("nonzero"), over the winner's epochs."""
    found = {n.removeprefix(f"{kind}/"): course for n, course in study.layers.items() if n.startswith(f"{kind}/")}
    if not found:
        return None
    traces = [
        line(name, [p.step for p in course], [p.value for p in course], i, mode="lines+markers", marker={"size": 3})
        for i, (name, course) in enumerate(found.items())
    ]
    words = {
        "alpha": ("alpha", "Learned alpha per layer", "1 is softmax, 1.5 is 1.5-entmax, 2 is sparsemax."),
        "nonzero": ("share of non-zero weights", "Sparsity per layer",
                    "Share of attention weights that are not exactly zero, on one batch of validation rows."),
    }  # fmt: skip
    y, title, caption = words[kind]
    number = study.tags.get("best_trial", "")
    figure = plot("epoch", y, traces, height=430)
    whole_numbers(figure, max(int(trace.x[-1]) for trace in traces))
    return Figure(figure_name(kind, study.name), title, f"Winner of {study.name} (trial {number}). {caption}", figure)


def _running_best(metric: str, scores: Sequence[float]) -> list[float]:
    """Best so far in the metric's own sign; NaN, which is not drawn, before the first score."""
    best, found = -math.inf, []
    for score in scores:
        best = max(best, score) if math.isfinite(score) else best
        found.append(shown(metric, best) if math.isfinite(best) else math.nan)
    return found
