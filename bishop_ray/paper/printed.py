"""Figures that the paper prints: tables 1 and 2, ablations, importance, the authors' configurations.

Xu et al., "BiSHop: Bi-Directional Cellular Learning for Tabular Data with Generalized Sparse Modern Hopfield Model",
ICML 2024. They are shown beside ours and never enter a search or a selection; only ``--warm-start paper`` uses
`tuned`. The numbers live in ``paper.yaml``; all scores are in percent (AUC, accuracy and R² times 100), as printed.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bishop_ray.errors import UnknownName

SCALE = 100.0
"""Paper's scores per unit of ours: they are in percent."""


@dataclass(frozen=True)
class Score:
    """One printed figure.

    Attributes:
        mean: In percent.
        std: Deviation in percent, None where none is printed (in these tables: nowhere).
        source: Where the paper quotes it from, "" where it is its own.
    """

    mean: float
    std: float | None = None
    source: str = ""


@dataclass(frozen=True)
class PaperTable:
    """One table: scores of models (or of an ablation's settings) on datasets.

    Attributes:
        title: Its caption's first words.
        note: What the figures are: runs, deviation, unit.
        datasets: In the paper's order: our names of Datasets I, OpenML task numbers (as text) of Datasets II.
        models: Registry names; for an ablation the settings, "full" or the first one being BiSHop as it is.
        printed: The summary lines the table itself prints, by name ("mean score", "mean rank", ...), then model.
    """

    title: str
    note: str
    datasets: tuple[str, ...]
    models: tuple[str, ...]
    printed: dict[str, dict[str, float]] = field(repr=False)
    _scores: dict[tuple[str, str], Score] = field(repr=False)
    _metrics: dict[str, str] = field(repr=False)
    _suites: dict[str, str] = field(repr=False)
    _names: dict[str, str] = field(repr=False)
    _trials: dict[str, int] = field(repr=False)

    def metric(self, dataset: str) -> str:
        """The metric of a dataset: "auc" (multi-class: the paper does not say which), "accuracy" or "r2".

        Raises:
            UnknownName: The table has no such dataset.
        """
        return self._metrics[self._known(dataset)]

    def suite(self, dataset: str) -> str:
        """Short name of the OpenML suite, "" in Datasets I; raises `UnknownName` as `metric` does."""
        return self._suites.get(self._known(dataset), "")

    def name(self, dataset: str) -> str:
        """The dataset's own name, e.g. "abalone" of task "361288"; raises `UnknownName` as `metric` does."""
        return self._names.get(self._known(dataset), dataset)

    def trials(self, dataset: str) -> int | None:
        """Configurations of BiSHop that the authors tried, where printed; raises `UnknownName` as `metric` does."""
        return self._trials.get(self._known(dataset))

    def score(self, dataset: str, model: str) -> Score | None:
        """The printed figure, or None where the table has none for this pair."""
        return self._scores.get((str(dataset), model))

    def ranks(self, model: str) -> tuple[float, ...]:
        """The model's rank on every dataset, as the paper counts: 1 is best, equal scores share the smallest rank.

        Raises:
            UnknownName: The table has no such model.
        """
        if model not in self.models:
            raise UnknownName("model of the paper's table", model, self.models)
        return tuple(self._rank(dataset, model) for dataset in self.datasets)

    def _rank(self, dataset: str, model: str) -> float:
        own = self._scores[dataset, model].mean
        return 1.0 + sum(self._scores[dataset, other].mean > own for other in self.models)

    def mean(self, model: str) -> float:
        """Mean score over the datasets, in percent, computed from the printed figures."""
        return statistics.fmean(self._scores[dataset, model].mean for dataset in self.datasets)

    def _known(self, dataset: str) -> str:
        if str(dataset) not in self.datasets:
            raise UnknownName("dataset of the paper's table", str(dataset), self.datasets)
        return str(dataset)


def table(number: int) -> PaperTable:
    """Table 1 (Datasets I, AUC) or table 2 (Datasets II, accuracy and R²), as printed.

    Raises:
        UnknownName: Another number.
    """
    tables = _data()["tables"]
    if str(number) not in tables:
        raise UnknownName("paper table", str(number), tables)
    return _table(tables[str(number)])


def ablation(name: str) -> PaperTable:
    """An ablation's printed figures: "components", "components_regression", "hopfield", "rotation" or "depth".

    Raises:
        UnknownName: The paper prints no such table; sparsity and convergence are figures without numbers.
    """
    tables = _data()["ablations"]
    if name not in tables:
        raise UnknownName("ablation table of the paper", name, tables)
    return _table(tables[name])


def importance() -> dict[str, dict[str, float]]:
    """Random-forest importance of BiSHop's hyperparameters: ``{"average": {"train.lr": 0.17, ...}}``.

    Only the average over all datasets is printed; the figures sum to 0.80, since not every parameter has a row
    (appendix, table "Hyperparameter Importance Scores").
    """
    return {"average": dict(_data()["importance"])}


def tuned(dataset: str) -> dict[str, dict[str, Any]] | None:
    """The authors' configuration of BiSHop for one of the nine datasets, as parameters of a trial; None for others.

    Chosen on that dataset's test split (reading.md row 3): it must not be used on the dataset itself. Source: the
    settings of the authors' public code, github.com/MAGICS-LAB/BiSHop; their batch size is 32.
    """
    rows = _data()["tuned"]
    if dataset not in rows["rows"]:
        return None
    model = dict(zip(rows["order"], rows["rows"][dataset], strict=True))
    return {"train": {"lr": model.pop("lr"), "batch_size": 32}, "model": model}


@functools.lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    text = Path(__file__).with_name("paper.yaml").read_text("utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def _table(raw: dict[str, Any]) -> PaperTable:
    datasets, models, marks = tuple(raw["datasets"]), tuple(raw["scores"]), raw.get("marks", {})
    suites = dict(zip(datasets, raw.get("suites", ()), strict=False))
    metric = raw["metric"]
    return PaperTable(
        title=raw["title"],
        note=raw["note"],
        datasets=datasets,
        models=models,
        printed={line: dict(zip(models, values, strict=True)) for line, values in raw.get("printed", {}).items()},
        _scores={
            (dataset, model): _score(cell, marks)
            for model, row in raw["scores"].items()
            for dataset, cell in zip(datasets, str(row).split(), strict=True)
        },
        _metrics={d: metric if isinstance(metric, str) else metric[suites[d]] for d in datasets},
        _suites=suites,
        _names=dict(zip(datasets, raw.get("names", ()), strict=False)),
        _trials=dict(zip(datasets, raw.get("trials", ()), strict=False)),
    )


def _score(cell: str, marks: dict[str, str]) -> Score:
    number = cell.rstrip("".join(marks)) if marks else cell
    return Score(float(number), source=marks[cell[len(number) :]] if number != cell else "")
