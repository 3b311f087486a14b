"""Figures of outcomes: scores with intervals, importance of hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go

from bishop_ray.report.figures import Figure, colour, figure_name, line, plot, safe
from bishop_ray.report.study_records import Predictions, Study
from bishop_ray.search.importance import Importance


def importance_bars(dataset: str, model: str, shares: Mapping[str, Mapping[str, float]]) -> Figure:
    """Importances side by side.

    Args:
        dataset: Of the figure's name.
        model: Registry name.
        shares: Method -> parameter -> share; the first decides the order.
    """
    order = sorted(next(iter(shares.values())), key=lambda name: next(iter(shares.values()))[name])
    order = [*(n for s in shares.values() for n in s if n not in order), *order]
    order = list(dict.fromkeys(order))
    traces = [
        go.Bar(y=[safe(n) for n in order], x=[row.get(n) for n in order], orientation="h", name=safe(method),
               marker={"color": colour(i)})
        for i, (method, row) in enumerate(shares.items())
    ]  # fmt: skip
    height = max(260, 90 + 14 * len(order) * len(shares))
    figure = plot("share", "", traces, height=height, barmode="group", legend_traceorder="normal")
    figure.update_yaxes(showgrid=False)
    caption = "Share of the differences in validation scores that each searched hyperparameter explains; see the table."
    title = f"Importance of hyperparameters: {model}"
    return Figure(figure_name("importance", dataset, model), title, caption, figure)


def study_importance(study: Study, found: Importance) -> Figure | None:
    """Importances of one study; None where it has too few trials."""
    if not found.forest:
        return None
    shares = {"random forest": found.forest, "fANOVA": found.fanova}
    figure = importance_bars(study.name, study.model, shares)
    trust = f" The forest's R² on trials it was not grown on: {found.out_of_bag:.2f}."
    return replace(figure, title=f"Importance of hyperparameters: {study.name}", caption=figure.caption + trust)


BINS = 10
"""Of equal numbers of rows."""
POINTS = 800
"""Most rows of a part that a scatter plot shows."""
LABELLED, SHOWN_CLASSES = 12, 60
"""Classes up to which a confusion matrix has numbers in it; up to which it is drawn."""


def outcome_figures(study: Study) -> list[Figure]:
    """Calibration and confusion matrix of a classifier, residuals of a regression; [] without kept predictions."""
    if study.validation is None or study.test is None:
        return []
    if not study.task.is_classification:
        return [_residuals(study, study.validation, study.test)]
    confusion = _confusion(study, study.test)
    return [_calibration(study, study.validation, study.test), *([confusion] if confusion else [])]


def reliability(part: Predictions) -> tuple[list[float], list[float], float]:
    """Mean confidence and frequency of being right per bin, and the expected calibration error.

    Two classes: the probability of the second one against how often it is true; more: the probability of the
    predicted class against how often that is right (Guo et al. 2017). Bins hold equal numbers of rows; rows of one
    probability are never split.

    Returns:
        (bins,), (bins,), and the mean of their distance weighted by rows.
    """
    if part.output.shape[1] == 2:
        confidence, right = part.output[:, 1], part.y == 1
    else:
        confidence, right = part.output.max(axis=1), part.output.argmax(axis=1) == part.y
    edges = np.unique(np.quantile(confidence, np.linspace(0, 1, BINS + 1)))
    bins = np.clip(np.searchsorted(edges, confidence, side="right") - 1, 0, max(0, len(edges) - 2))
    rows = np.bincount(bins)
    used = rows > 0
    mean = np.bincount(bins, confidence)[used] / rows[used]
    share = np.bincount(bins, right.astype(float))[used] / rows[used]
    return mean.tolist(), share.tolist(), float(np.average(np.abs(mean - share), weights=rows[used]))


def _calibration(study: Study, validation: Predictions, test: Predictions) -> Figure:
    traces: list[go.Scatter] = [
        go.Scatter(x=[0, 1], y=[0, 1], mode="lines", line={"color": "#999", "dash": "dot"}, name="perfect")
    ]
    errors = []
    for i, (name, part) in enumerate((("validation", validation), ("test", test))):
        mean, share, error = reliability(part)
        traces.append(line(f"{name} ({len(part.y)} rows)", mean, share, i, mode="lines+markers", marker={"size": 7}))
        errors.append(f"{name} {error:.3f}")
    two = len(study.classes) == 2
    x = f"predicted probability of {study.classes[1]}" if two else "probability of the predicted class"
    y = f"share that is {study.classes[1]}" if two else "share that is right"
    figure = plot(x, y, traces, xaxis_range=[-0.02, 1.02], yaxis_range=[-0.02, 1.02])
    caption = (
        f"Up to {BINS} bins of equal numbers of rows; expected calibration error: {', '.join(errors)}. Few rows make "
        f"it jump. {_training(study)}"
    )
    return Figure(figure_name("calibration", study.name), f"Calibration of {study.name}", caption, figure)


def _confusion(study: Study, test: Predictions) -> Figure | None:
    n = len(study.classes)
    if n > SHOWN_CLASSES:
        return None
    truth, guess = test.y.astype(int), test.output.argmax(axis=1)
    counts = np.bincount(truth * n + guess, minlength=n * n).reshape(n, n)
    totals = counts.sum(axis=1, keepdims=True)
    shares = counts / np.maximum(totals, 1)
    names = [safe(name if len(name) <= 18 else f"{name[:17]}…") for name in study.classes]
    places = list(range(n))
    heat = go.Heatmap(z=shares, x=places, y=places, colorscale="Blues", zmin=0, zmax=1, showscale=n > LABELLED,
                      xgap=1, ygap=1, hoverinfo="none" if n <= LABELLED else "x+y+z")  # fmt: skip
    figure = plot("predicted", "true", [heat], height=360 if n <= 4 else 460)
    ticks = {"tickvals": places, "ticktext": names, "showgrid": False, "ticks": ""}
    figure.update_xaxes(**ticks)
    figure.update_yaxes(**ticks, autorange="reversed")
    if n <= LABELLED:
        for i in places:
            for j in places:
                dark = shares[i, j] > 0.55
                figure.add_annotation(x=j, y=i, text=f"{counts[i, j]}", showarrow=False,
                                      font={"color": "white" if dark else "#222"})  # fmt: skip
    accuracy = float(np.mean(truth == guess))
    caption = (
        f"Test rows ({len(truth)}) by true and most probable class; the shade is the share of a true class's rows. "
        f"Accuracy {100 * accuracy:.2f} %. {_training(study)}"
    )
    return Figure(figure_name("confusion", study.name), f"Confusion matrix of {study.name}", caption, figure)


def _residuals(study: Study, validation: Predictions, test: Predictions) -> Figure:
    traces = []
    spreads = []
    for i, (name, part) in enumerate((("validation", validation), ("test", test))):
        guess = part.output[:, 0]
        left = part.y - guess
        spreads.append(f"{name}: mean {left.mean():.4g}, standard deviation {left.std():.4g}")
        rows = np.random.default_rng(0).permutation(len(left))[:POINTS]
        marker = {"color": colour(i), "size": 5, "opacity": 0.45}
        traces.append(
            go.Scatter(x=guess[rows], y=left[rows], mode="markers", marker=marker, name=f"{name} ({len(left)} rows)")
        )
    figure = plot("prediction", "target minus prediction", traces)
    figure.add_hline(y=0, line={"color": "#444", "width": 1})
    caption = f"In the target's units. {'; '.join(spreads)}. {_training(study)}"
    if max(len(validation.y), len(test.y)) > POINTS:
        caption += f" At most {POINTS} rows of a part are drawn."
    return Figure(figure_name("residuals", study.name), f"Residuals of {study.name}", caption, figure)


def _training(study: Study) -> str:
    """Whose predictions they are."""
    if study.tags.get("automl"):
        return "Of the winner as the search trained it."
    return "Of the winner's first training after the search."
