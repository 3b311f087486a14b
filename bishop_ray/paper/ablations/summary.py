"""Ablation tables: means, deviations, curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import bishop_ray.paper.printed as paper
from bishop_ray.errors import UnknownName
from bishop_ray.paper.ablations.records import COMPLETE, AblationRun
from bishop_ray.paper.ablations.run import AblationResult

Row = dict[str, Any]
COLUMNS = (
    "ablation", "dataset", "setting", "model", "metric", "runs", "failed", "validation", "validation_std", "test",
    "test_std", "difference", "difference_std", "paper", "paper_difference", "best_epoch", "seconds", "note",
)  # fmt: skip
AVERAGE = "average"
"""Stands for the dataset in rows over several."""


def table(results: Sequence[AblationResult]) -> list[Row]:
    """A row per dataset, setting and model in the order of the settings; then averages, where there are several.

    ``test`` is the mean over runs with its sample deviation; ``difference`` the mean over seeds of a run's test score
    minus that of the base setting with the same seed; ``paper`` what the paper prints for this dataset and setting, in
    the metric's unit (its percent divided by 100), and ``paper_difference`` its distance from the paper's base.
    ``seconds`` is per run.
    """
    rows = [row for result in results for row in _rows(result)]
    return rows + (_averages(rows) if len(results) > 1 else [])


def _rows(result: AblationResult) -> list[Row]:
    config, rows = result.config, []
    for setting in config.settings:
        own = [r for r in result.records if (r.setting, r.model) == (setting.name, setting.model)]
        base = config.bases[setting.model]
        good = [r for r in own if r.status == COMPLETE]
        reference = {
            r.seed: r.test
            for r in result.records
            if (r.setting, r.model, r.status) == (base, setting.model, COMPLETE) and r.test is not None
        }
        gaps = [r.test - reference[r.seed] for r in good if r.test is not None and r.seed in reference]
        printed, of_base = (_printed(result, name, setting.model) for name in (setting.name, base))
        skipped = result.skipped.get((setting.name, setting.model), "")
        rows.append({
            "ablation": config.name,
            "dataset": config.study.ref.key,
            "setting": setting.name,
            "model": setting.model,
            "metric": config.study.metric,
            "runs": len(good),
            "failed": len(own) - len(good),
            "validation": _mean(r.validation for r in good),
            "validation_std": _std([r.validation for r in good if r.validation is not None]),
            "test": _mean(r.test for r in good),
            "test_std": _std([r.test for r in good if r.test is not None]),
            "difference": "" if setting.name == base else _mean(gaps),
            "difference_std": "" if setting.name == base else _std(gaps),
            "paper": printed,
            "paper_difference": printed - of_base if "" not in (printed, of_base) and setting.name != base else "",
            "best_epoch": _mean(best_epoch(r) for r in good),
            "seconds": _mean(r.seconds for r in good),
            "note": f"skipped: {skipped}" if skipped else ("base" if setting.name == base else ""),
        })  # fmt: skip
    return rows


def best_epoch(record: AblationRun) -> float | None:
    """The epoch (of models of other libraries: the chunk of rounds) with the best validation score."""
    scores = {epoch: m["epoch/val_score"] for epoch, m in record.epochs.items() if "epoch/val_score" in m}
    return float(max(scores, key=lambda epoch: (scores[epoch], -epoch))) if scores else None


def _printed(result: AblationResult, setting: str, model: str) -> Any:
    """The paper's figure for a setting on the result's dataset in units of our metric, "" where it has none."""
    ref, name = result.config.study.ref, result.config.name
    if model != "bishop":
        return ""
    for title in (name, f"{name}_regression"):
        try:
            printed = paper.ablation(title)
        except UnknownName:
            continue
        for dataset in (ref.locator, ref.name):
            if dataset in printed.datasets and printed.metric(dataset) == result.config.study.metric:
                score = printed.score(dataset, setting)
                return score.mean / paper.SCALE if score is not None else ""
    return ""


def _averages(rows: Sequence[Row]) -> list[Row]:
    """Per setting, model and metric: the mean over the datasets that have all settings of the model."""
    found: list[Row] = []
    for setting, model, metric in dict.fromkeys((r["setting"], r["model"], r["metric"]) for r in rows):
        whole = _whole_datasets(rows, model, metric)
        own = [r for r in rows if (r["setting"], r["model"], r["metric"]) == (setting, model, metric)]
        own = [r for r in own if r["dataset"] in whole]
        if len(own) < 2:
            continue
        row = dict.fromkeys(COLUMNS, "") | {n: own[0][n] for n in ("ablation", "setting", "model", "metric")}
        for name in ("validation", "test", "difference", "paper", "paper_difference"):
            row[name] = "" if any(r[name] == "" for r in own) else statistics.fmean(r[name] for r in own)
        row |= {"dataset": AVERAGE, "runs": sum(r["runs"] for r in own), "failed": sum(r["failed"] for r in own)}
        found.append(row | {"note": f"of {len(own)} datasets: {', '.join(r['dataset'] for r in own)}"})
    return found


def _whole_datasets(rows: Sequence[Row], model: str, metric: str) -> set[str]:
    """Datasets with a score for every setting: only over those are averages of settings comparable."""
    mine = [r for r in rows if (r["model"], r["metric"]) == (model, metric)]
    lacking = {r["dataset"] for r in mine if r["test"] == ""}
    return {r["dataset"] for r in mine} - lacking


def run_rows(results: Sequence[AblationResult]) -> list[Row]:
    """Every run: the columns that its MLflow run has."""
    return [
        {
            "ablation": result.config.name,
            "dataset": result.config.study.ref.key,
            "setting": record.setting,
            "model": record.model,
            "base_setting": result.config.bases[record.model],
            "seed": record.seed,
            "metric": result.config.study.metric,
            "status": record.status,
            "validation": record.validation,
            "test": record.test,
            "seconds": record.seconds,
            "epochs": len(record.epochs),
            "test_openings": record.test_openings,
            "reason": record.reason,
        }
        for result in results
        for record in result.records
    ]


def curve_rows(results: Sequence[AblationResult]) -> list[Row]:
    """Per dataset, setting, model, epoch and quantity: mean and deviation over the runs that have trained so far.

    Quantities are ``train_loss``, ``val_loss`` and ``val_score`` as the runs report them; scores are larger-is-better.
    ``low`` and ``high`` are the mean minus and plus one sample deviation.
    """
    rows: list[Row] = []
    for result in results:
        for setting in result.config.settings:
            own = [r for r in result.records if (r.setting, r.model) == (setting.name, setting.model)]
            own = [r for r in own if r.status == COMPLETE]
            for epoch in range(1, max((max(r.epochs, default=0) for r in own), default=0) + 1):
                for name in ("train_loss", "val_loss", "val_score"):
                    values = [
                        r.epochs[epoch][f"epoch/{name}"] for r in own if f"epoch/{name}" in r.epochs.get(epoch, {})
                    ]
                    if values:
                        mean, std = statistics.fmean(values), _std(values) or 0.0
                        rows.append({
                            "ablation": result.config.name, "dataset": result.config.study.ref.key,
                            "setting": setting.name, "model": setting.model, "epoch": epoch, "quantity": name,
                            "runs": len(values), "mean": mean, "std": std, "low": mean - std, "high": mean + std,
                        })  # fmt: skip
    return rows


def _mean(values: Iterable[float | None]) -> Any:
    """The mean, "" of nothing."""
    found = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(found) if found else ""


def _std(values: Sequence[float]) -> Any:
    """The sample deviation, "" of fewer than two."""
    return statistics.stdev(values) if len(values) > 1 else ""
