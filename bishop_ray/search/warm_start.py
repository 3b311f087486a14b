"""Warm start: configurations that were good on similar tables, tried first.

From the paper: what its authors tuned for its nine tables. From MLflow: the winners of the user's own studies on
similar tables. Never from a study of the same table: it was chosen with rows that are test rows here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import bishop_ray.paper.printed as printed
from bishop_ray.config import StudyConfig
from bishop_ray.data.paper_datasets import PAPER_SETS
from bishop_ray.data.refs import ROLES
from bishop_ray.search.dataset import Loaded
from bishop_ray.search.parameters import Range
from bishop_ray.search.space import SearchSpace, flatten
from bishop_ray.search.study import OpenStudy, open_study
from bishop_ray.tracking.query import Reader, RunRecord

logger = logging.getLogger(__name__)
MOST = 5
"""Points taken from MLflow."""
SIMILAR = 2.0
"""Largest `distance` of a similar table: ten times the rows and ten times the columns, say."""
_COMMON = {
    "adult": ("income", "census"),
    "income": ("adult", "census"),
    "blastchar": ("churn", "telco"),
    "shrutime": ("churn",),
}
"""Words by which further copies of the paper's tables go; adult and income hold the same people."""


@dataclass(frozen=True)
class Shape:
    """What makes tables similar.

    Attributes:
        task: The task type.
        rows: Of all parts together.
        numerical: Numerical columns.
        categorical: Categorical columns.
        classes: 0 for regression, and where it is not known.
    """

    task: str
    rows: int
    numerical: int
    categorical: int
    classes: int = 0


def distance(one: Shape, other: Shape) -> float:
    """How unlike two tables are: decades of rows and columns, share of categories, octaves of classes.

    Infinite across tasks.
    """
    if one.task != other.task:
        return math.inf
    columns = [max(1, shape.numerical + shape.categorical) for shape in (one, other)]
    shares = [shape.categorical / count for shape, count in zip((one, other), columns, strict=True)]
    octaves = abs(math.log2(one.classes / other.classes)) if one.classes and other.classes else 0.0
    decades = abs(math.log10(max(1, one.rows) / max(1, other.rows))) + abs(math.log10(columns[0] / columns[1]))
    return decades + abs(shares[0] - shares[1]) + octaves


def open_warm(config: StudyConfig, space: SearchSpace, loaded: Loaded) -> OpenStudy:
    """`store.open_study`; a new study gets the points of ``config.warm_start``, and keeps them.

    Raises:
        UserError: As `store.open_study`; or MLflow's store cannot be read.
    """

    def points() -> list[dict[str, Any]]:
        if config.warm_start == "paper":
            return _told(space, _of_paper(config, loaded), "of the paper's authors")
        if config.warm_start == "mlflow":
            return _told(space, _of_mlflow(config, space, loaded), "of earlier studies on similar tables")
        return []

    return open_study(config, space, loaded.fingerprint, points)


def _told(space: SearchSpace, found: Iterable[dict[str, Any]], whose: str) -> list[dict[str, Any]]:
    every = list(found)
    inside = _distinct(space, [point for given in every if (point := in_space(space, given)) is not None])
    logger.info(
        "warm start of %s: %d configuration(s) %s tried early; %d more lie outside space %s or are there already",
        space.model, len(inside), whose, len(every) - len(inside), space.name,
    )  # fmt: skip
    return inside


def in_space(space: SearchSpace, given: dict[str, Any]) -> dict[str, Any] | None:
    """A flat configuration as a point of the space, or None if one of its values cannot be drawn there.

    What the space searches and the configuration does not name is taken from the space's first point; what the space
    does not search stays at the space's own constants.
    """
    point = {}
    for name, entry in space.searched.items():
        value = given.get(name, space.first[0].get(name) if space.first else None)
        if value is None or not entry.holds(value):
            return None
        point[name] = value
    return point


def _distinct(space: SearchSpace, points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    known = [point for point, _ in space.queue()]
    kept: list[dict[str, Any]] = []
    for point in points:
        if point not in known and point not in kept:
            kept.append(point)
    return kept


def _of_paper(config: StudyConfig, loaded: Loaded) -> list[dict[str, Any]]:
    if config.model != "bishop":
        return []
    names = [name for name in printed.table(1).datasets if not same_table(name, config.ref.name, sum(loaded.rows))]
    return [flatten(found) for name in names if (found := printed.tuned(name)) is not None]


def same_table(known: str, name: str, rows: int) -> bool:
    """Whether a table may be one of the paper's nine under another name: by a word of its name, or as many rows."""
    plain = "".join(c for c in name.lower() if c.isalnum())
    words = {"".join(c for c in word if c.isalnum()) for word in (known, *_COMMON.get(known, ()))}
    record = PAPER_SETS[known]
    counts = {record.rows, sum((record.part or {}).values())}
    return any(word in plain for word in words) or rows in counts


def _of_mlflow(config: StudyConfig, space: SearchSpace, loaded: Loaded) -> list[dict[str, Any]]:
    """Winners of finished studies of the model, nearest table first, one per table: the latest."""
    reader = Reader(config.tracking_uri)
    studies = reader.runs({"bishop.kind": "study", "model": config.model, "task": loaded.train.task.value})
    own, nearest = _shape(loaded), {}
    for run in studies:  # oldest first: the latest of a table stays
        data, shape = run.tags.get("data_hash", ""), shape_of(run)
        # With other weights, groups or times the same table has another hash, and its test rows may be theirs.
        known = run.tags.get("dataset") == config.ref.key and (config.ref.roles or ROLES in run.tags)
        if run.status == "FINISHED" and shape is not None and data and data != loaded.fingerprint and not known:
            nearest[data] = (distance(own, shape), run)
    chosen = sorted((found for found in nearest.values() if found[0] <= SIMILAR), key=lambda found: found[0])
    points = []
    for _, run in chosen[:MOST]:
        wanted = {
            "bishop.study_id": run.tags.get("bishop.study_id", ""),
            "bishop.trial": run.tags.get("best_trial", ""),
        }
        if all(wanted.values()):
            points += [_values(space, trial) for trial in reader.runs(wanted, run.experiment)[:1]]
    return points


def _shape(loaded: Loaded) -> Shape:
    categorical = len(loaded.train.categorical)
    classes = 0 if loaded.train.task.value == "regression" else int(loaded.train.target.nunique())
    columns = loaded.train.frame.shape[1]
    return Shape(loaded.train.task.value, sum(loaded.rows), columns - categorical, categorical, classes)


def shape_of(run: RunRecord) -> Shape | None:
    """The table of a study, from the tags of its run; None where they do not say."""
    try:
        numerical, categorical = (int(part.split()[0]) for part in run.tags["columns"].split(","))
        rows = sum(int(part) for part in run.tags["rows"].split("/"))
        return Shape(run.tags["task"], rows, numerical, categorical, int(run.tags.get("classes", 0)))
    except (KeyError, ValueError, IndexError):
        return None


def _values(space: SearchSpace, trial: RunRecord) -> dict[str, Any]:
    """What a trial's run says of the searched parameters; MLflow keeps text."""
    return {
        name: value
        for name, entry in space.searched.items()
        if (text := trial.params.get(name)) is not None and (value := parsed(entry, text)) is not None
    }


def parsed(entry: Range, text: str) -> Any:
    """The value of a parameter that MLflow keeps as `text`, None where it cannot be one of the range."""
    if entry.kind == "choice":
        return next((choice for choice in entry.values if str(choice) == text), None)
    try:
        return int(text) if entry.kind == "int" else float(text)
    except ValueError:
        return None
