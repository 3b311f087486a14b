"""What stands in a report, in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bishop_ray.paper import importance
from bishop_ray.reporting.ablations import ablation_figures, ablation_table
from bishop_ray.reporting.drawing import Figure
from bishop_ray.reporting.importance_figures import importance_bars, study_importance
from bishop_ray.reporting.importance_table import ABOUT, importance_table, notes
from bishop_ray.reporting.outcome_figures import outcome_figures
from bishop_ray.reporting.page import Section
from bishop_ray.reporting.records import Ablation, Study, Table
from bishop_ray.reporting.search_figures import (
    best_over_time,
    best_over_trials,
    layers,
    parallel,
    survival,
)
from bishop_ray.reporting.tables import by_dataset, cost_table, optimism_table, ranks_table, results_table
from bishop_ray.tuning.importance import Importance, average


def contents(studies: Sequence[Study], runs: Sequence[Ablation], found: Mapping[str, Importance]) -> list[Section]:
    """The sections; one that would be empty is left out.

    Args:
        studies: Sorted by dataset and model.
        runs: Of ablations.
        found: Study -> its importances.
    """
    sections: list[Section] = []
    if studies:
        sections.append(Section("Results", tables=(results_table(studies),)))
        sections += [Section(t.title, tables=(t,)) for t in (ranks_table(studies), cost_table(studies)) if t]
        if optimism := optimism_table(studies):
            sections.append(Section("Optimism", tables=(optimism,)))
        sections += _importance(studies, found)
    if table := ablation_table(runs):
        sections.append(Section("Ablations", tables=(table,), figures=tuple(ablation_figures(runs))))
    for dataset, own in by_dataset(studies).items():
        figures = [best_over_trials(dataset, own), best_over_time(dataset, own), survival(dataset, own)]
        for study in own:
            figures += _figures(study, found[study.name])
        sections.append(Section(f"Searches on {dataset}", figures=tuple(f for f in figures if f)))
    return sections


def _figures(study: Study, found: Importance) -> list[Figure | None]:
    return [
        parallel(study),
        study_importance(study, found),
        layers(study, "alpha"),
        layers(study, "nonzero"),
        *outcome_figures(study),
    ]


def _importance(studies: Sequence[Study], found: Mapping[str, Importance]) -> list[Section]:
    """A table per model, and for BiSHop the averages beside the paper's figures."""
    tables: list[Table] = []
    figures: list[Figure] = []
    without: list[str] = []
    for model in dict.fromkeys(study.model for study in studies):
        own = [study for study in studies if study.model == model]
        by_dataset: dict[str, dict[str, Importance]] = {}
        for study in own:
            by_dataset.setdefault(study.dataset, {})[study.name] = found[study.name]
        if table := importance_table(model, by_dataset):
            tables.append(table)
        else:
            without += notes(by_dataset)
        usable = [found[study.name] for study in own if found[study.name].forest]
        if model == "bishop" and usable:
            shares = {
                "random forest": average([one.forest for one in usable]),
                "fANOVA": average([one.fanova for one in usable]),
                "paper (random forest)": importance()["average"],
            }
            figures.append(importance_bars("average", model, shares))
    return [Section("Importance of hyperparameters", (ABOUT, *without), tuple(tables), tuple(figures))]
