"""Figures and tables of ablations in the report."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray

from bishop_ray.errors import UnknownName, UserError
from bishop_ray.paper.ablations.settings import ABLATIONS
from bishop_ray.paper.printed import SCALE, PaperTable, ablation
from bishop_ray.report.figures import DASHES, Figure, colour, figure_name, line, plot, safe, whole_numbers
from bishop_ray.report.paper_section import paper_dataset
from bishop_ray.report.study_records import AblationRecords, ReportTable
from bishop_ray.report.tables import UNITS, shown, unit
from bishop_ray.tracking.ablation import KIND
from bishop_ray.tracking.query import Reader, RunRecord

COURSES = ("epoch/train_loss", "epoch/val_loss", "epoch/val_score")
"""Metrics whose course a picture of convergence shows."""
ENDED = ("FINISHED", "FAILED")
OWN = ("seed", "train.seed")
"""Parameters in which the runs of one setting differ."""
SAME = ("metric", "data_hash", "rows", "base_setting")
"""Tags that all runs of one ablation have in common."""


def collect_ablations(reader: Reader, experiment: str, datasets: set[str]) -> tuple[list[AblationRecords], int]:
    """Ablation runs of an experiment, and those of these datasets in any; and how many more do not go with them.

    Of several ablations of one name, dataset, model and metric (a search of another storage folder, another seed of the
    split) the newest counts, and those of the same configurations with other seeds; others would not compare.
    """
    runs = reader.runs({"bishop.kind": KIND})
    runs = [run for run in runs if run.status in ENDED]
    runs = [run for run in runs if run.experiment == experiment or run.tags.get("dataset", "") in datasets]
    groups: dict[tuple[str, ...], dict[str, list[RunRecord]]] = {}
    for run in runs:
        name = (run.params.get("ablation", ""), *(run.tags.get(tag, "") for tag in ("dataset", "model", "metric")))
        groups.setdefault(name, {}).setdefault(run.tags.get("bishop.ablation_id", ""), []).append(run)
    kept = [run for ablations in groups.values() for run in _comparable(list(ablations.values()))]
    return [_ablation(reader, run) for run in kept], len(runs) - len(kept)


def _comparable(ablations: list[list[RunRecord]]) -> list[RunRecord]:
    """The runs of the newest of these ablations, and of those that repeat it with other seeds."""
    newest, *others = sorted(ablations, key=lambda own: max(run.start for run in own), reverse=True)
    taken = list(newest)
    for own in others:
        known, configurations = _configurations(taken), _configurations(own)
        common = known.keys() & configurations.keys()
        same = common and all(known[setting] == configurations[setting] for setting in common)
        if same and not {run.params.get("seed") for run in own} & {run.params.get("seed") for run in taken}:
            taken += own
    return taken


def _configurations(runs: list[RunRecord]) -> dict[str, tuple[object, ...]]:
    """Setting -> what decides its results, but for the seed."""
    return {
        run.params.get("setting", ""): (
            {name: value for name, value in run.params.items() if name not in OWN},
            [run.tags.get(tag, "") for tag in SAME],
        )
        for run in runs
    }


def read_ablations(path: Path) -> list[AblationRecords]:
    """The rows of a CSV file of runs that ``jobs/ablate.py`` wrote; of a column ``base_setting``, where it has one.

    Raises:
        UserError: No such file, or a column is missing.
    """
    wanted = ("ablation", "dataset", "model", "setting", "metric", "seed", "validation", "test")
    try:
        frame = pd.read_csv(
            path, dtype=dict.fromkeys((*wanted[:6], "base_setting"), str), keep_default_na=False, na_values=[""]
        )
    except (OSError, ValueError) as error:
        raise UserError(f"--ablations: expected a CSV file of jobs/ablate.py; found {path} ({error})") from None
    if missing := [name for name in wanted if name not in frame.columns]:
        raise UserError(f"--ablations: {path}: expected columns {', '.join(wanted)}; found none named {missing[0]!r}")
    frame["base"] = frame["base_setting"].fillna("") if "base_setting" in frame.columns else ""
    columns = (*wanted, "base")
    return [AblationRecords(**{name: row[name] for name in columns}) for row in frame.to_dict("records")]


def _ablation(reader: Reader, run: RunRecord) -> AblationRecords:
    courses = {}
    if run.params.get("ablation") == "convergence":
        courses = {name: reader.course(run.run_id, name) for name in COURSES if name in run.metrics}
    return AblationRecords(
        ablation=run.params.get("ablation", ""),
        dataset=run.tags.get("dataset", ""),
        model=run.params.get("model", run.tags.get("model", "")),
        setting=run.params.get("setting", ""),
        metric=run.tags.get("metric", ""),
        seed=run.params.get("seed", ""),
        validation=float(run.metrics.get("validation", math.nan)),
        test=float(run.metrics.get("test", math.nan)),
        base=run.tags.get("base_setting", ""),
        courses=courses,
    )


LOSSES = {
    "epoch/train_loss": " The loss: mean over the batches of an epoch, penalties of the network included.",
    "epoch/val_loss": " The loss: cross-entropy, or mean squared error of the standardised target.",
}
"""What the losses are."""
Key = tuple[str, str, str, str, str]
"""Ablation, dataset, model, metric, setting."""
Groups = dict[Key, list[AblationRecords]]


def grouped(runs: Sequence[AblationRecords]) -> Groups:
    """Runs by `Key`, in the order of the ablation's settings."""
    groups: Groups = {}
    places = {pair: _places(*pair) for pair in {(run.ablation, run.model) for run in runs}}

    def place(run: AblationRecords) -> tuple[str, str, str, str, int]:
        own = places[run.ablation, run.model]
        return run.ablation, run.dataset, run.model, run.metric, own.get(run.setting, len(own))

    for run in sorted(runs, key=place):
        groups.setdefault((run.ablation, run.dataset, run.model, run.metric, run.setting), []).append(run)
    return groups


def _places(name: str, model: str) -> dict[str, int]:
    """Setting -> its place in an ablation; nothing for one that is not known."""
    settings = ABLATIONS[name].settings([model]) if name in ABLATIONS else []
    return {setting.name: i for i, setting in enumerate(settings)}


def ablation_table(runs: Sequence[AblationRecords]) -> ReportTable | None:
    """Mean and deviation per setting, the difference to the base, and the paper's figures; None without runs."""
    groups = grouped(runs)
    if not groups:
        return None
    frame = pd.DataFrame([_row(key, group, groups) for key, group in groups.items()])
    notes = [
        UNITS,
        "Fixed configurations, nothing is selected by a score: test score, mean and sample deviation over runs "
        "(training seeds), of the epoch with the best validation score. difference: mean over seeds of a run's "
        "distance to that of the setting base with the same seed. A failed run has no score.",
    ]
    if frame["paper"].notna().any():
        notes.append(
            "The paper's figures are means at its own defaults, over 3 runs (components) or 10 (hopfield) where it "
            "says, without deviations; its text says: of the last checkpoint."
        )
    digits = dict.fromkeys(["paper", "ours", "±", "difference", "validation"], 2)
    return ReportTable("ablations", "Ablations", frame, tuple(notes), digits)


def _row(key: Key, group: Sequence[AblationRecords], groups: Groups) -> dict[str, Any]:
    name, dataset, model, metric, setting = key
    scale, base = unit(metric), group[-1].base
    good = [run for run in group if not run.failed]
    tests = [run.test for run in good]
    reference = {run.seed: run.test for run in groups.get((*key[:4], base), ()) if not run.failed}
    gaps = [run.test - reference[run.seed] for run in good if run.seed in reference and setting != base]
    paper = _paper(name, dataset, setting, metric) if model == "bishop" else None
    return {
        "ablation": name,
        "dataset": dataset,
        "model": model,
        "setting": setting,
        "base": base,
        "metric": metric,
        "paper": math.nan if paper is None else scale * paper,
        "ours": scale * _mean(tests),
        "±": scale * statistics.stdev(tests) if len(tests) > 1 else math.nan,
        "difference": scale * _mean(gaps),
        "validation": scale * _mean([run.validation for run in good]),
        "runs": len(good),
        "failed": len(group) - len(good),
    }


def _mean(values: Sequence[float]) -> float:
    """The mean, NaN of nothing."""
    return statistics.fmean(values) if values else math.nan


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


def ablation_figures(runs: Sequence[AblationRecords]) -> list[Figure]:
    """A picture per ablation and dataset: bars, or curves over depth, removed features, or epochs."""
    figures: list[Figure] = []
    pictures: dict[tuple[str, str], list[AblationRecords]] = {}
    metrics: dict[tuple[str, str], set[str]] = {}
    scored = [run for group in grouped(runs).values() for run in group if not run.failed]
    for run in scored:
        metrics.setdefault((run.ablation, run.dataset), set()).add(run.metric)
    for run in scored:
        several = len(metrics[run.ablation, run.dataset]) > 1
        pictures.setdefault((run.ablation, f"{run.dataset}, {run.metric}" if several else run.dataset), []).append(run)
    for (name, dataset), group in pictures.items():
        if name == "convergence":
            figures += _convergence(dataset, group)
        elif name in ("depth", "sparsity"):
            figures.append(_curves(name, dataset, group))
        else:
            figures.append(_bars(name, dataset, group))
    return figures


def _bars(name: str, dataset: str, runs: Sequence[AblationRecords]) -> Figure:
    groups = grouped(runs)
    metric = runs[0].metric
    traces = []
    for i, model in enumerate(dict.fromkeys(key[2] for key in groups)):
        rows = [(key[4], [unit(metric) * r.test for r in group]) for key, group in groups.items() if key[2] == model]
        error = {"type": "data", "array": [float(np.std(v, ddof=1)) if len(v) > 1 else 0.0 for _, v in rows]}
        traces.append(
            go.Scatter(x=[float(np.mean(v)) for _, v in rows], y=[safe(s) for s, _ in rows], error_x=error,
                       mode="markers", marker={"color": colour(i), "size": 9}, name=safe(model))
        )  # fmt: skip
    # Points, not bars: a bar would have to begin at zero, where no difference could be seen.
    figure = plot(f"test {metric}", "", traces, height=max(220, 90 + 34 * len({k[4] for k in groups})))
    figure.update_yaxes(autorange="reversed")
    caption = "Mean test score per setting, with the sample deviation over runs. The axis does not begin at zero."
    return Figure(figure_name("ablation", name, dataset), f"Ablation {name}, {dataset}", caption, figure)


def _curves(name: str, dataset: str, runs: Sequence[AblationRecords]) -> Figure:
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
    x = "features removed, percent" if name == "sparsity" else "levels of the encoder"
    caption = "Mean test score with the sample deviation over runs."
    figure = whole_numbers(plot(x, f"test {metric}", traces, height=420), max(int(trace.x[-1]) for trace in traces))
    return Figure(figure_name("ablation", name, dataset), f"Ablation {name}, {dataset}", caption, figure)


def _labels(name: str, run: AblationRecords, runs: Sequence[AblationRecords]) -> list[tuple[str, str]]:
    """The lines that a run is a point of, by model and order of removal; with all features, those of all orders."""
    if name != "sparsity":
        return [(run.model, "")]
    words = [run.setting] if run.setting != "all" else [r.setting for r in runs if r.model == run.model]
    orders = dict.fromkeys(word.partition("_")[0] for word in words if "_" in word)
    return [(run.model, order) for order in orders] or [(run.model, "")]


def _convergence(dataset: str, runs: Sequence[AblationRecords]) -> list[Figure]:
    """Mean and band of one deviation over runs, by epoch: losses of training and validation rows, and the score."""
    figures, metric = [], runs[0].metric
    titles = ("training loss", "validation loss", f"validation {metric}")
    for course, title in zip(COURSES, titles, strict=True):
        drawn = [run for run in runs if run.courses.get(course)]
        if not drawn:  # of a CSV file, or of an earlier version
            continue
        scale = shown(metric, 1.0) if course == "epoch/val_score" else 1.0
        traces: list[go.Scatter] = []
        settings = dict.fromkeys(run.setting for run in drawn)
        for i, setting in enumerate(settings):
            group = [run for run in drawn if run.setting == setting]
            epochs, mean, spread = _band(group, course, scale)
            shade = {"x": [*epochs, *reversed(epochs)], "y": [*(mean + spread), *reversed(mean - spread)]}
            traces.append(line(f"{setting} ({len(group)} runs)", epochs, mean.tolist(), i, legendgroup=setting))
            traces.append(
                go.Scatter(**shade, fill="toself", fillcolor=colour(i), opacity=0.18, mode="lines", line={"width": 0},
                           showlegend=False, hoverinfo="skip", legendgroup=setting, name=safe(f"{setting}, band"))
            )  # fmt: skip
        figure = whole_numbers(plot("epoch", title, traces), max(int(max(trace.x)) for trace in traces))
        name = figure_name("ablation-convergence", title, dataset)
        caption = "Mean and one sample deviation over the runs that trained this long." + LOSSES.get(course, "")
        figures.append(Figure(name, f"Convergence, {title}, {dataset}", caption, figure))
    return figures


def _band(
    runs: Sequence[AblationRecords], course: str, scale: float
) -> tuple[list[int], NDArray[np.float64], NDArray[np.float64]]:
    """Epochs, and the mean and deviation (0 of one run) of the scaled values at each."""
    values: dict[int, list[float]] = {}
    for run in runs:
        for point in run.courses[course]:
            values.setdefault(point.step, []).append(scale * point.value)
    epochs = sorted(values)
    mean = np.array([np.mean(values[e]) for e in epochs])
    return epochs, mean, np.array([np.std(values[e], ddof=1) if len(values[e]) > 1 else 0.0 for e in epochs])
