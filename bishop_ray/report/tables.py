"""Tables of a report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from bishop_ray.errors import BadTable
from bishop_ray.metrics import display, evaluate, larger_is_better
from bishop_ray.paper.printed import importance
from bishop_ray.report.paper_section import differences, paper_score
from bishop_ray.report.study_records import COMPLETE, EARLY, FAILED, ReportTable, Study
from bishop_ray.search.importance import Importance, average

RESAMPLES = 500
"""Of the bootstrap (Efron and Tibshirani 1993, percentile interval)."""


def interval(study: Study, resamples: int = RESAMPLES) -> tuple[float, float, int]:
    """The 95 % percentile interval of a training's test score, and the rows it is from; NaN, NaN, 0 if unknown.

    Resamples on which the metric is undefined (one class only) are left out. Scores are larger-is-better.
    """
    kept = study.test
    if kept is None or len(kept.y) < 2:
        return math.nan, math.nan, 0
    y = kept.y.astype(np.int64) if study.task.is_classification else kept.y
    random = np.random.default_rng(0)
    scores = []
    for _ in range(resamples):
        rows = random.integers(0, len(y), len(y))
        try:
            scores.append(evaluate(study.metric, study.task, y[rows], kept.output[rows]))
        except BadTable:
            continue
    if not scores:
        return math.nan, math.nan, 0
    low, high = np.quantile(scores, [0.025, 0.975])
    return float(low), float(high), len(y)


FRACTIONS = ("auc", "accuracy", "balanced_accuracy", "f1", "r2")
"""Metrics shown in percent, as the paper does; others in their own units."""
UNITS = "AUC, accuracy, F1 and R² in percent; other metrics in their own units and sign."


def shown(metric: str, score: float) -> float:
    """A score as people read it: in the metric's own sign, fractions in percent."""
    return display(metric, score) * unit(metric)


def unit(metric: str) -> float:
    """What a difference of scores is multiplied with to be shown: 100 for fractions."""
    return 100.0 if metric in FRACTIONS else 1.0


def by_pair(studies: Sequence[Study]) -> dict[tuple[str, str], list[Study]]:
    """Evaluated studies by (dataset, model): one per split seed."""
    pairs: dict[tuple[str, str], list[Study]] = {}
    for dataset, own in by_dataset(studies).items():
        for study in own:
            if study.scores:
                pairs.setdefault((dataset, study.model), []).append(study)
    return pairs


def by_dataset(studies: Sequence[Study]) -> dict[str, list[Study]]:
    """Studies by dataset; where those of one were searched by several metrics, by both, since scores must compare."""
    metrics: dict[str, set[str]] = {}
    for study in studies:
        metrics.setdefault(study.dataset, set()).add(study.metric)
    groups: dict[str, list[Study]] = {}
    for study in studies:
        several = len(metrics[study.dataset]) > 1
        groups.setdefault(f"{study.dataset}, {study.metric}" if several else study.dataset, []).append(study)
    return groups


def pair_mean(group: Sequence[Study]) -> float:
    """Mean test score of the studies of one dataset and model."""
    return statistics.fmean(study.test_mean for study in group)


def results_table(studies: Sequence[Study]) -> ReportTable:
    """A row per dataset and model: the paper's figure, ours, the difference."""
    rows = [_result(*pair, group) for pair, group in by_pair(studies).items()]
    columns = ["dataset", "model", "metric", "paper", "ours", "±", "difference", "validation", "linear", "constant",
               "splits", "trainings", "trained on"]  # fmt: skip
    notes = [
        UNITS,
        "ours: test score of the configuration with the best validation score, mean over trainings and split seeds; ±: "
        "sample deviation over split seeds, or over trainings where there is one split. linear, constant: a linear "
        "model and the constant prediction on the same test rows.",
    ]
    open_ones = [study.name for study in studies if not study.scores]
    if open_ones:
        notes.append(f"Not evaluated yet, so not in the table: {', '.join(open_ones)}.")
    for dataset, own in by_dataset(studies).items():
        if len({(study.tags.get("data_hash"), study.params.get("split")) for study in own}) > 1:
            notes.append(
                f"{dataset}: the studies differ in data or fractions of the split: their scores do not compare."
            )
    frame = pd.DataFrame(rows, columns=columns)
    digits = dict.fromkeys(columns[3:10], 2)
    return ReportTable("results", "Results", frame, (*notes, *differences(list(studies))), digits)


def _result(dataset: str, model: str, group: Sequence[Study]) -> dict[str, Any]:
    metric, mean = group[0].metric, pair_mean(group)
    paper = paper_score(group[0])
    means = [study.test_mean for study in group]
    spread = means if len(means) > 1 else list(group[0].scores)

    def over(name: str) -> float:
        found = [study.metrics.get(name, math.nan) for study in group]
        return shown(metric, statistics.fmean(found))

    return {
        "dataset": dataset,
        "model": model,
        "metric": metric,
        "paper": math.nan if paper is None else shown(metric, paper),
        "ours": shown(metric, mean),
        "±": statistics.stdev(spread) * unit(metric) if len(spread) > 1 else math.nan,
        "difference": math.nan if paper is None else unit(metric) * (mean - paper),
        "validation": over("best_val_score"),
        "linear": over("test_score_linear"),
        "constant": over("test_score_constant"),
        "splits": len(group),
        "trainings": sum(len(study.scores) for study in group),
        "trained on": group[0].tags.get("trained_on", "train"),
    }


def ranks_table(studies: Sequence[Study]) -> ReportTable | None:
    """Ranks of the models on the datasets that all of them have; None where no two models share one."""
    pairs = by_pair(studies)
    models, datasets = _comparable(list(pairs))
    if len(models) < 2:
        return None
    ours = _ranks({d: {m: pair_mean(pairs[d, m]) for m in models} for d in datasets})
    printed = {d: {m: paper_score(pairs[d, m][0]) for m in models} for d in datasets}
    known = {d: {m: s for m, s in row.items() if s is not None} for d, row in printed.items()}
    theirs = _ranks({d: row for d, row in known.items() if len(row) == len(models)})
    rows = [
        {
            "model": model,
            "mean": statistics.fmean(ours[model]),
            "median": statistics.median(ours[model]),
            "min": min(ours[model]),
            "max": max(ours[model]),
            "datasets": len(ours[model]),
            "mean rank of the paper's figures": statistics.fmean(theirs[model]) if theirs else math.nan,
            "datasets of the paper": len(theirs[model]) if theirs else 0,
        }
        for model in models
    ]
    notes = [
        "1 is best. Equal scores share the mean of their ranks (the paper gives them the smallest). Ranks are among "
        "the models of this report, on the datasets that all of them have; the paper's figures are ranked in the same "
        "way, on those of these datasets for which it has a figure of every model here.",
    ]
    for words, missing in (
        ("Datasets left out, because a model has no result", {d for d, _ in pairs} - set(datasets)),
        ("Models left out, because they share no dataset with the others", {m for _, m in pairs} - set(models)),
    ):
        if missing:
            notes.append(f"{words}: {', '.join(sorted(missing))}.")
    frame = pd.DataFrame(rows).sort_values("mean", kind="stable")
    digits = {"mean": 2, "median": 1, "min": 1, "max": 1, "mean rank of the paper's figures": 2}
    return ReportTable("ranks", "Ranks", frame, tuple(notes), digits)


def _comparable(pairs: Sequence[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Models and the datasets that all of them have; those with the fewest are left out until there is one."""
    models = sorted({model for _, model in pairs})
    names = list(dict.fromkeys(dataset for dataset, _ in pairs))
    while True:
        datasets = [dataset for dataset in names if all((dataset, model) in pairs for model in models)]
        if datasets or not models:
            return models, datasets
        models.remove(min(models, key=lambda m: (sum(model == m for _, model in pairs), m)))


def _ranks(scores: Mapping[str, Mapping[str, float]]) -> dict[str, list[float]]:
    """Model -> its rank on each dataset, ties as average ranks."""
    found: dict[str, list[float]] = {}
    for row in scores.values():
        for model, rank in pd.Series(row).rank(ascending=False, method="average").items():
            found.setdefault(str(model), []).append(float(rank))
    return found


def cost_table(studies: Sequence[Study]) -> ReportTable:
    """What the searches took."""
    rows = []
    for study in studies:
        seconds = np.nansum([trial.seconds for trial in study.trials])
        workers = float(study.params.get("workers_per_trial", 1))
        peaks = [trial.peak_mb for trial in study.trials if math.isfinite(trial.peak_mb)]
        rows.append(
            {
                "study": study.name,
                "trials": len(study.trials),
                "complete": study.count(COMPLETE),
                "stopped early": study.count(EARLY),
                "failed": study.count(FAILED),
                "CPU hours": seconds * workers * float(study.params.get("cpus_per_worker", math.nan)) / 3600,
                "GPU hours": seconds * workers * float(study.params.get("gpus_per_worker", math.nan)) / 3600,
                "wall hours": (study.end - study.start) / 3.6e6 if study.end else math.nan,
                "peak memory MB": max(peaks) if peaks else math.nan,
            }
        )
    notes = (
        "CPU and GPU hours: time of the trials times what each asks for at least; the final evaluation is not in them. "
        "Wall hours: from the run's first start to its last end. Peak memory: the largest resident memory of a trial's "
        "process, libraries included; a dash: not recorded.",
    )
    digits = {"CPU hours": 3, "GPU hours": 3, "wall hours": 3, "peak memory MB": 0}
    return ReportTable("cost", "Cost of the searches", pd.DataFrame(rows), notes, digits)


def optimism_table(studies: Sequence[Study], resamples: int = RESAMPLES) -> ReportTable | None:
    """How much better the validation score is than the test score, and how sure the latter is; None if unknown."""
    rows = []
    for study in studies:
        if not study.scores:
            continue
        low, high, used = interval(study, resamples)
        rows.append(
            {
                "study": study.name,
                "metric": study.metric,
                "configurations": len(study.trials),
                "validation": shown(study.metric, study.validation_score),
                "test": shown(study.metric, study.test_mean),
                "optimism": unit(study.metric) * (study.validation_score - study.test_mean),
                "95 % from": shown(study.metric, low if larger_is_better(study.metric) else high),
                "to": shown(study.metric, high if larger_is_better(study.metric) else low),
                "test rows": used or math.nan,
            }
        )
    if not rows:
        return None
    notes = (
        "optimism: validation minus test of the selected configuration, positive where validation looked better, in "
        "whichever direction the metric counts. It grows with the number of configurations tried, since the best of "
        "many validation scores is partly luck. 95 %: percentile interval of the test score of one training, from "
        "resampling the test rows with replacement; a dash: its predictions were not kept.",
    )
    digits = {"validation": 2, "test": 2, "optimism": 2, "95 % from": 2, "to": 2, "test rows": 0}
    return ReportTable("optimism", "Optimism", pd.DataFrame(rows), notes, digits)


ABOUT = (
    "Shares of the differences in validation scores that a hyperparameter explains. forest: impurity decrease in a "
    "random forest over logged trials, as the paper computes it; its figures are an average over its datasets, from "
    "random search without early stopping, and sum to 0.80. fANOVA: over the search space. Trials that were stopped "
    "early count with the score they had reached. A dash: not searched, or not in the paper's table."
)
Found = Mapping[str, Mapping[str, Importance]]
"""Dataset -> study -> its importances."""


def importance_table(model: str, found: Found) -> ReportTable | None:
    """Importance of one model's hyperparameters; None where no study has enough trials and the paper no figures.

    Args:
        model: Registry name.
        found: Its studies.
    """
    columns = _columns(model, found)
    if not columns:
        return None
    names = list(dict.fromkeys(name for shares in reversed(columns.values()) for name in shares))
    rows = [{"parameter": n} | {c: s.get(n, math.nan) for c, s in columns.items()} for n in names]
    order = next((c for c in columns if not c.startswith("paper")), next(iter(columns)))
    frame = pd.DataFrame(rows).sort_values(order, ascending=False, kind="stable", na_position="last")
    return ReportTable(f"importance-{model}", model, frame, notes(found), dict.fromkeys(columns, 3))


def _columns(model: str, found: Found) -> dict[str, Mapping[str, float]]:
    """Title -> parameter -> share: the paper's, means over several datasets, then each dataset's."""
    usable = {d: own for d, rows in found.items() if (own := [one for one in rows.values() if one.forest])}
    forests = {dataset: average([one.forest for one in rows]) for dataset, rows in usable.items()}
    fanovas = {dataset: average([one.fanova for one in rows]) for dataset, rows in usable.items()}
    columns: dict[str, Mapping[str, float]] = {}
    if model == "bishop":
        columns["paper, forest"] = importance()["average"]
    if len(usable) > 1:
        columns["mean, forest"] = average(list(forests.values()))
        columns["mean, fANOVA"] = average(list(fanovas.values()))
    for dataset in usable:
        columns |= {f"{dataset}, forest": forests[dataset], f"{dataset}, fANOVA": fanovas[dataset]}
    return columns


def notes(found: Found) -> tuple[str, ...]:
    """How far each study's shares can be trusted, or why it has none."""
    notes = []
    for rows in found.values():
        for name, one in rows.items():
            noise = ", so its shares are noise" if one.out_of_bag <= 0 else ""
            words = (
                f"{one.trials} trials; the forest explains {one.out_of_bag:.2f} of the variance (R²) of trials it was "
                f"not grown on{noise}"
            )
            notes.append(f"{name}: {one.problem or words}.")
    return tuple(notes)
