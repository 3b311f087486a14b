"""Ablations: the table beside the paper's, and the curves that the paper draws."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from bishop_ray.errors import UnknownName
from bishop_ray.paper import SCALE, PaperTable, ablation
from bishop_ray.reporting.drawing import DASHES, Figure, colour, line, plot, safe
from bishop_ray.reporting.paper import paper_dataset
from bishop_ray.reporting.records import Ablation, Table
from bishop_ray.reporting.search_figures import figure_name
from bishop_ray.reporting.tables import UNITS, unit

REFERENCES = ("full", "gsh", "all")
"""Settings that stand for BiSHop as it is."""

Key = tuple[str, str, str, str]
"""Ablation, dataset, model, setting."""

Groups = dict[Key, list[Ablation]]


def grouped(runs: Sequence[Ablation]) -> Groups:
    """Runs by (ablation, dataset, model, setting); the setting that changes nothing comes first."""
    groups: Groups = {}
    for run in sorted(runs, key=lambda r: (r.ablation, r.dataset, r.model, r.setting not in REFERENCES)):
        groups.setdefault((run.ablation, run.dataset, run.model, run.setting), []).append(run)
    return groups


def ablation_table(runs: Sequence[Ablation]) -> Table | None:
    """Mean and deviation per setting, the difference to the whole model, and the paper's figures; None without runs."""
    groups = grouped(runs)
    if not groups:
        return None
    means = {key: statistics.fmean(run.test for run in group) for key, group in groups.items()}
    frame = pd.DataFrame([_row(key, group, means) for key, group in groups.items()])
    notes = (
        UNITS,
        "Fixed configurations, nothing is selected by a score: test score, mean and sample deviation over runs "
        "(training seeds), of the epoch with the best validation score. difference: of the means, to the setting full, "
        "gsh or all of the same dataset and model. The paper's figures are means at its own defaults over 3 runs "
        "(components) or 10 (hopfield), without deviations; its text says: of the last checkpoint.",
    )
    digits = dict.fromkeys(["paper", "ours", "±", "difference", "validation"], 2)
    return Table("ablations", "Ablations", frame, notes, digits)


def _row(key: Key, group: Sequence[Ablation], means: dict[Key, float]) -> dict[str, Any]:
    name, dataset, model, setting = key
    metric = group[0].metric
    scale = unit(metric)
    tests = [run.test for run in group]
    whole = [means[name, dataset, model, s] for s in REFERENCES if (name, dataset, model, s) in means]
    paper = _paper(name, dataset, setting, metric) if model == "bishop" else None
    return {
        "ablation": name,
        "dataset": dataset,
        "model": model,
        "setting": setting,
        "metric": metric,
        "paper": math.nan if paper is None else scale * paper,
        "ours": scale * means[key],
        "±": scale * statistics.stdev(tests) if len(tests) > 1 else math.nan,
        "difference": scale * (means[key] - whole[0]) if whole and setting not in REFERENCES else math.nan,
        "validation": scale * statistics.fmean(run.validation for run in group),
        "runs": len(group),
    }


def _paper(name: str, dataset: str, setting: str, metric: str) -> float | None:
    """The paper's figure of a setting as a fraction, None without one."""
    for known in (name, f"{name}_regression"):
        try:
            found: PaperTable = ablation(known)
        except UnknownName:
            continue
        own = paper_dataset(found, dataset)
        score = found.score(own, setting) if own and found.metric(own) == metric else None
        if score:
            return score.mean / SCALE
    return None


def ablation_figures(runs: Sequence[Ablation]) -> list[Figure]:
    """A picture per ablation and dataset: bars, or curves over depth, removed features, or epochs."""
    figures: list[Figure] = []
    by_pair: dict[tuple[str, str], list[Ablation]] = {}
    for run in runs:
        by_pair.setdefault((run.ablation, run.dataset), []).append(run)
    for (name, dataset), group in by_pair.items():
        if name == "convergence":
            figures += _convergence(dataset, group)
        elif name in ("depth", "sparsity"):
            figures.append(_curves(name, dataset, group))
        else:
            figures.append(_bars(name, dataset, group))
    return figures


def _bars(name: str, dataset: str, runs: Sequence[Ablation]) -> Figure:
    groups = grouped(runs)
    metric = runs[0].metric
    traces = []
    for i, model in enumerate(dict.fromkeys(key[2] for key in groups)):
        rows = [(key[3], [unit(metric) * r.test for r in group]) for key, group in groups.items() if key[2] == model]
        error = {"type": "data", "array": [float(np.std(v, ddof=1)) if len(v) > 1 else 0.0 for _, v in rows]}
        traces.append(
            go.Scatter(x=[float(np.mean(v)) for _, v in rows], y=[safe(s) for s, _ in rows], error_x=error,
                       mode="markers", marker={"color": colour(i), "size": 9}, name=safe(model))
        )  # fmt: skip
    # Points, not bars: a bar would have to begin at zero, where no difference could be seen.
    figure = plot(f"test {metric}", "", traces, height=max(220, 90 + 34 * len({k[3] for k in groups})))
    figure.update_yaxes(autorange="reversed")
    caption = "Mean test score per setting, with the sample deviation over runs. The axis does not begin at zero."
    return Figure(figure_name("ablation", name, dataset), f"Ablation {name}, {dataset}", caption, figure)


def _curves(name: str, dataset: str, runs: Sequence[Ablation]) -> Figure:
    """Score over the number in a setting, a line per model and per word in it (the order of removal)."""
    metric = runs[0].metric
    lines: dict[tuple[str, str], dict[float, list[float]]] = {}
    for run in runs:
        number = re.search(r"\d+(?:\.\d+)?", run.setting)
        at = float(number.group()) if number else 0.0
        for label in _labels(name, run, runs):
            lines.setdefault(label, {}).setdefault(at, []).append(unit(metric) * run.test)
    traces = []
    models, orders = ({word: i for i, word in enumerate(dict.fromkeys(words))} for words in zip(*lines, strict=True))
    for (model, order), points in lines.items():
        xs = sorted(points)
        error = {"type": "data", "array": [float(np.std(points[x], ddof=1)) if len(points[x]) > 1 else 0 for x in xs]}
        means = [float(np.mean(points[x])) for x in xs]
        title = f"{model}, {order}" if order else model
        style = {"dash": DASHES[orders[order] % len(DASHES)]}
        traces.append(line(title, xs, means, models[model], mode="lines+markers", error_y=error, line=style))
    x = "features removed, percent" if name == "sparsity" else "number of layers"
    caption = "Mean test score with the sample deviation over runs."
    figure = plot(x, f"test {metric}", traces, height=420)
    return Figure(figure_name("ablation", name, dataset), f"Ablation {name}, {dataset}", caption, figure)


def _labels(name: str, run: Ablation, runs: Sequence[Ablation]) -> list[tuple[str, str]]:
    """The lines that a run is a point of, by model and order of removal; with all features, those of all orders."""
    if name != "sparsity":
        return [(run.model, "")]
    words = [run.setting] if run.setting != "all" else [r.setting for r in runs if r.model == run.model]
    orders = dict.fromkeys(word.partition("_")[0] for word in words if "_" in word)
    return [(run.model, order) for order in orders] or [(run.model, "")]


def _convergence(dataset: str, runs: Sequence[Ablation]) -> list[Figure]:
    """Mean and band of one standard deviation over runs, by epoch: training loss and validation score."""
    figures = []
    for course, title in (("epoch/train_loss", "training loss"), ("epoch/val_score", "validation score")):
        traces: list[go.Scatter] = []
        settings = dict.fromkeys(run.setting for run in runs)
        for i, setting in enumerate(settings):
            group = [run for run in runs if run.setting == setting and run.courses.get(course)]
            epochs, mean, spread = _band(group, course)
            if not epochs:
                continue
            shade = {"x": [*epochs, *reversed(epochs)], "y": [*(mean + spread), *reversed(mean - spread)]}
            traces.append(line(f"{setting} ({len(group)} runs)", epochs, mean.tolist(), i, legendgroup=setting))
            traces.append(
                go.Scatter(**shade, fill="toself", fillcolor=colour(i), opacity=0.18, mode="lines", line={"width": 0},
                           showlegend=False, hoverinfo="skip", legendgroup=setting, name=safe(f"{setting}, band"))
            )  # fmt: skip
        if traces:
            figure = plot("epoch", title, traces)
            name = figure_name("ablation-convergence", title, dataset)
            caption = "Mean and one standard deviation over the runs that trained this long."
            figures.append(Figure(name, f"Convergence, {title}, {dataset}", caption, figure))
    return figures


def _band(runs: Sequence[Ablation], course: str) -> tuple[list[int], NDArray[np.float64], NDArray[np.float64]]:
    values: dict[int, list[float]] = {}
    for run in runs:
        for point in run.courses[course]:
            values.setdefault(point.step, []).append(point.value)
    epochs = sorted(values)
    mean = np.array([np.mean(values[e]) for e in epochs])
    return epochs, mean, np.array([np.std(values[e]) for e in epochs])
