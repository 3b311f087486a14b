"""The paper's figures beside ours, as a section of the report.

The differences are the rows of the table "Differences from the paper" in
``models/bishop/README.md`` and those of the paper's own protocol.
"""

from __future__ import annotations

import re

from bishop_ray.data.refs import ROLES, path_part
from bishop_ray.paper.printed import SCALE, PaperTable, table
from bishop_ray.report.study_records import Study

TABLES = (1, 2)
COMMON = (
    "Selection: here by validation score only, and the test split is opened once, after the search; the authors' "
    "published sweep maximises a score of the test split.",
    "Weights: here those of the best validation score; the paper's text says last checkpoint.",
    "Optimizer: Adam with gradients clipped at norm 1, as the text says but for the clipping; the authors' code uses "
    "AdamW. Patience 20 as in the text (their code: 40) and at most 200 epochs, or the study's lower max_epochs.",
    "Trials: here as counted below, random and TPE samplers with early stopping; the paper's are up to 200 of a random "
    "search that was ended by hand once it beat the baselines (its text says so).",
    "Baselines: here searched and trained by the same path as BiSHop, on the same rows; the paper quotes most of its "
    "baselines from other papers, with other splits.",
    "Values in percent; a difference is ours minus the paper's. The paper prints no deviations in these tables.",
)
"""Differences under every table with the paper's figures."""
PER_TABLE = {
    1: (
        "Split: 70 % train, 20 % validation, 10 % test, seeded and stratified, as the paper's row counts say (its "
        "text: 70/10/20).",
        "Metric: AUC; with more than two classes (jannis) one-vs-rest, macro average: the paper does not say which.",
        "spambase: 57 features; the paper counts 58 and prints 100 for every strong model, which an honest split of "
        "this table does not give (98 to 99).",
    ),
    2: (
        "Split: cut to 10,000 rows, then 7,000 train, 900 validation, 2,100 test, as in the paper; smaller sets keep "
        "all rows and the same fractions. Ours is seeded, and stratified in classification.",
        "Metric: accuracy, or R² over the whole split; the authors' code averages R² over batches, which is biased.",
        "Feature counts: the target is never among the features (the paper's counts of CC, CR and NR include it).",
        "The paper's figures are the best of a search, not means over seeds.",
    ),
}
"""Differences that belong to one of the paper's tables."""


def own_key(key: str) -> str:
    """The key of a dataset without the experiment of ``jobs/reproduce.py`` before it."""
    return re.sub(r"^paper-table-\d(-defaults)?-", "", key)


def paper_dataset(found: PaperTable, key: str) -> str:
    """The table's name for a dataset of ours, "" where it has none.

    Args:
        found: Table 1 or 2.
        key: `DatasetRef.key`: ``adult`` or ``paper-adult``; ``CR-abalone`` or ``361288-abalone``; each of them also as
            `own_key` takes it.
    """
    key = own_key(key)
    for dataset in found.datasets:
        suite, name = found.suite(dataset), path_part(found.name(dataset))
        keys = {f"{suite}-{name}", f"{dataset}-{name}"} if suite else {name, f"paper-{name}"}
        if key in keys:
            return dataset
    return ""


def table_of(key: str) -> int:
    """The table that has this dataset, 0 for none."""
    return next((number for number in TABLES if paper_dataset(table(number), key)), 0)


def paper_score(study: Study) -> float | None:
    """The paper's figure for a study's dataset and model as a fraction; None without one, or for another metric."""
    number = table_of(study.dataset)
    if not number:
        return None
    found = table(number)
    dataset = paper_dataset(found, study.dataset)
    score = found.score(dataset, study.model) if found.metric(dataset) == study.metric else None
    return score.mean / SCALE if score else None


def differences(studies: list[Study]) -> tuple[str, ...]:
    """What to know when reading the paper's figures beside these; () where none is shown."""
    numbers = sorted({table_of(study.dataset) for study in studies if paper_score(study) is not None})
    notes = [note for number in numbers for note in PER_TABLE[number]]
    small = any(study.tags.get("search_space", "").endswith("_small") for study in studies if study.model == "bishop")
    if numbers and small:
        notes.append("Search space of BiSHop: bishop_small, sizes that CPUs train, not the paper's.")
    if numbers:
        notes += [
            f"{study.name}: rows with {roles}, which the paper's protocol has not: its scores do not compare."
            for study in studies
            if (roles := study.tags.get(ROLES, "")) and paper_score(study) is not None
        ]
    return (*COMMON, *notes) if numbers else ()
