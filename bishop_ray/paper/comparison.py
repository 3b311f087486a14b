"""Our figures beside the paper's: one row per dataset and model, and what they say together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from bishop_ray.paper.printed import SCALE
from bishop_ray.search.leaderboard import rows_csv

if TYPE_CHECKING:
    from bishop_ray.config import StudyResult
    from bishop_ray.paper.printed import PaperTable


TREES = ("xgboost", "lightgbm", "catboost", "random_forest", "gbdt")
"""Models made of decision trees."""
OURS = "bishop"


@dataclass(frozen=True)
class ComparisonRow:
    """One dataset and model; scores in percent, as the paper prints them.

    Attributes:
        dataset: As the paper's table names it.
        name: The dataset's own name.
        model: Registry name.
        metric: Of all scores.
        validation: Of the winners in their searches, mean over the splits.
        test: Of the winners trained again, mean over seeds, then over the splits.
        std: Deviation of `test`: over the splits, or with one split over the seeds.
        splits: How many there were.
        paper: The paper's figure, None where it has none.
        optimism: `validation` minus `test`.
        trials: Of all splits together, ended in whatever way.
        hours: Wall time of all splits' studies.
        linear: Test score of a linear model, mean over the splits.
    """

    dataset: str
    name: str
    model: str
    metric: str
    validation: float
    test: float
    std: float
    splits: int
    paper: float | None
    optimism: float
    trials: int
    hours: float
    linear: float

    @property
    def difference(self) -> float | None:
        """`test` minus `paper`."""
        return None if self.paper is None else self.test - self.paper


def compare(table: PaperTable, results: Mapping[str, Sequence[StudyResult]]) -> list[ComparisonRow]:
    """The rows of a reproduction, in the order of the datasets.

    Args:
        table: The paper's.
        results: By dataset of the table: those of every model and split.
    """
    rows = []
    for dataset, found in results.items():
        for model in dict.fromkeys(result.model for result in found):
            rows.append(_row(table, dataset, [result for result in found if result.model == model]))
    return rows


def _row(table: PaperTable, dataset: str, results: Sequence[StudyResult]) -> ComparisonRow:
    first = results[0]
    tests = [SCALE * result.test_mean for result in results]
    printed = table.score(dataset, first.model)
    validation, test = SCALE * statistics.fmean(result.val_score for result in results), statistics.fmean(tests)
    return ComparisonRow(
        dataset,
        table.name(dataset),
        first.model,
        first.metric,
        validation,
        test,
        statistics.stdev(tests) if len(tests) > 1 else SCALE * first.test_std,
        len(results),
        None if printed is None else printed.mean,
        validation - test,
        sum(sum(result.trials.values()) for result in results),
        sum(result.seconds for result in results) / 3600.0,
        SCALE * statistics.fmean(result.linear for result in results),
    )


def distances(rows: Sequence[ComparisonRow], model: str = OURS, others: Sequence[str] = TREES) -> dict[str, float]:
    """By dataset, the test score of `model` minus that of the best of `others` there, in points.

    The best one is the best on the test split, which favours `others`. Datasets without both are left out.
    """
    found = {}
    for dataset in dict.fromkeys(row.dataset for row in rows):
        own = [row.test for row in rows if (row.dataset, row.model) == (dataset, model)]
        best = [row.test for row in rows if row.dataset == dataset and row.model in others]
        if own and best:
            found[dataset] = own[0] - max(best)
    return found


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Student's interval of the mean of paired differences, infinite for one value.

    https://docs.scipy.org/doc/scipy/reference/generated/scipy.stats.t.html

    Raises:
        ValueError: No values.
    """
    from scipy import stats

    if not values:
        raise ValueError("no values")
    mean = statistics.fmean(values)
    if len(values) == 1:
        return -math.inf, math.inf
    half = float(stats.t.ppf((1 + level) / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def conclusions(rows: Sequence[ComparisonRow]) -> list[str]:
    """What the rows say together, in words."""
    lines = []
    if found := distances(rows):
        values = list(found.values())
        low, high = interval(values)
        spread = "" if math.isinf(low) else f" (95 % interval over the datasets {low:+.2f} to {high:+.2f})"
        lines.append(
            f"{OURS} minus the best tree model, mean over {len(values)} dataset(s): {statistics.fmean(values):+.2f} "
            f"points{spread}"
        )
    if pairs := [row.difference for row in rows if row.model == OURS and row.difference is not None]:
        lines.append(f"{OURS} minus the paper's figure, mean over {len(pairs)} dataset(s): "
                     f"{statistics.fmean(pairs):+.2f} points")  # fmt: skip
    if rows:
        lines.append(f"cost: {sum(row.trials for row in rows)} trials, {sum(row.hours for row in rows):.2f} hours of "
                     "wall time in all studies")  # fmt: skip
    return lines


def render(rows: Sequence[ComparisonRow], failed: Sequence[tuple[str, str, str]] = ()) -> str:
    """The rows as aligned text, then a line for each dataset and model of `failed` that has none.

    Args:
        rows: As `compare` made them.
        failed: The dataset as the table names it, its own name, the model.
    """
    from bishop_ray.search.leaderboard import columns

    head = ("dataset", "model", "metric", "validation", "test", "paper", "difference", "optimism", "trials", "hours")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        paper = "" if row.paper is None else f"{row.paper:.2f}"
        difference = "" if row.difference is None else f"{row.difference:+.2f}"
        numbers = (f"{row.validation:.2f}", f"{row.test:.2f} ±{row.std:.2f}", paper, difference, f"{row.optimism:+.2f}")
        shown = _label(row.dataset, row.name)
        lines.append((shown, row.model, row.metric, *numbers, str(row.trials), f"{row.hours:.2f}"))
    there = {(row.dataset, row.model) for row in rows}
    for dataset, name, model in dict.fromkeys(failed):
        if (dataset, model) not in there:
            lines.append((_label(dataset, name), model, "failed", *[""] * (len(head) - 3)))
    return columns(lines)


def _label(dataset: str, name: str) -> str:
    return dataset if name == dataset else f"{dataset} {name}"


def to_csv(rows: Sequence[ComparisonRow]) -> str:
    """CSV with full precision; what the paper lacks is empty."""
    return rows_csv([asdict(row) | {"difference": row.difference} for row in rows])
