"""Bars of hyperparameters' importance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import plotly.graph_objects as go

from bishop_ray.reporting.drawing import Figure, colour, plot, safe
from bishop_ray.reporting.records import Study
from bishop_ray.reporting.search_figures import figure_name
from bishop_ray.tuning.importance import Importance


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
