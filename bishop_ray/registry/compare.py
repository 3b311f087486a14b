"""Comparison of two versions by their validation predictions or a hold-out file."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from bishop_ray.data.files import Chunk, read_chunks, target_values
from bishop_ray.data.table import TaskType
from bishop_ray.errors import BadTable, UserError
from bishop_ray.metrics.bootstrap import Difference, Scored, paired_bootstrap
from bishop_ray.predictor import Predictor, label_texts
from bishop_ray.registry.gate_cases import FOLDER, Validation
from bishop_ray.registry.loading import fetch

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion


logger = logging.getLogger(__name__)
BATCH = 10_000


def score_file(predictor: Predictor, file: Path) -> Scored:
    """Target and predictions of a file's R rows; rows without a target are left out, and counted in a note.

    Args:
        predictor: Its columns and its target are looked for.
        file: .csv, .tsv (also .gz) or .parquet.

    Raises:
        BadTable: The file cannot be read, lacks a column, has a label that the predictor does not know, or no rows.
    """
    target = predictor.target
    labels = frozenset(label_texts(predictor))
    parts, outputs, lost = [], [], 0
    for batch in _batches(predictor, file):
        values = target_values(file, batch.kept.column(target.name).to_pandas(), labels)
        known = values.notna().to_numpy()
        lost += int((~known).sum())
        if known.any():
            parts.append(target.encode(values[known].rename(target.name)))
            outputs.append(predictor.output(batch.frame[known]))
    if not parts:
        raise BadTable(f"--holdout {file}: expected rows with a value of the target {target.name!r}; found none")
    if lost:
        logger.warning("%s: left out %d rows without a target (%r)", file, lost, target.name)
    return Scored(np.concatenate(parts), np.concatenate(outputs), target.units)


def _batches(predictor: Predictor, file: Path) -> Iterator[Chunk]:
    try:
        yield from read_chunks(file, BATCH, predictor.schema, predictor.levels, [predictor.target.name])
    except BadTable as error:
        raise BadTable(f"--holdout: {str(error).removeprefix('--keep: ')}") from None


TRAIN = "train"
"""Tag ``trained_on`` of a version that never saw validation rows, which is what its absence means too."""


@dataclass(frozen=True)
class VersionComparison:
    """The end of a comparison.

    Attributes:
        wins: The new version becomes champion.
        promising: It does not, and its score is better all the same.
        reason: Why.
    """

    wins: bool
    promising: bool
    reason: str

    @property
    def tag(self) -> str:
        """As it stands at the version."""
        return f"{'yes' if self.wins else 'no'}: {self.reason}"


def judge_new(new: ModelVersion, champion: ModelVersion, validation: Validation | None, uri: str) -> VersionComparison:
    """Whether `new` becomes champion in the place of `champion`.

    Of other data: yes, since the champion's score says nothing of them. Of the same search: by the validation score,
    which ranks its models. Otherwise only where a paired bootstrap on the same validation rows says so.

    Args:
        new: The version.
        champion: The present one.
        validation: Predictions of the new one.
        uri: MLflow address.
    """
    if new.tags.get("bishop.data", "") != champion.tags.get("bishop.data", ""):
        other = f"version {champion.version} was trained on other data or another split; its score says nothing here"
        return VersionComparison(True, False, other)
    metrics = [version.tags.get("bishop.metric", "") for version in (new, champion)]
    if metrics[0] != metrics[1]:
        return VersionComparison(
            False, False, f"metric {metrics[0]!r} cannot be compared with the champion's {metrics[1]!r}"
        )
    scores = [score_of(version) for version in (new, champion)]
    if scores[0] is None or scores[1] is None:
        return VersionComparison(False, False, f"version {champion.version} has no readable val_score")
    words = f"{scores[0]:.6g} against {scores[1]:.6g} of version {champion.version}"
    rows = [version.tags.get("bishop.validation", "") for version in (new, champion)]
    same_search = _search(new) == _search(champion)
    if same_search or (rows[0] and rows[0] == rows[1]):
        # A refit has its model's score, and more rows than the model itself.
        refit = [version.tags.get("trained_on", TRAIN) != TRAIN for version in (new, champion)]
        if scores[0] == scores[1] and refit[0] > refit[1]:
            return VersionComparison(True, False, f"{words}, and a refit")
    if same_search or scores[0] <= scores[1]:
        return VersionComparison(scores[0] > scores[1], False, words)
    try:
        difference = compare_stored(new, champion, uri, validation)
    except UserError as error:
        return VersionComparison(False, True, f"{words}, but {error}")
    if difference.better:
        return VersionComparison(True, False, f"better than version {champion.version}: {difference.words()}")
    return VersionComparison(
        False, True, f"not beyond chance better than version {champion.version}: {difference.words()}"
    )


def compare_stored(new: ModelVersion, old: ModelVersion, uri: str, validation: Validation | None = None) -> Difference:
    """Two versions' difference on the validation rows whose predictions lie with both.

    Args:
        new: The version that may be better.
        old: The other.
        uri: MLflow address.
        validation: Predictions of `new`, where they are at hand.

    Raises:
        UserError: They were not selected on the same rows or by the same metric, or predictions are not there.
    """
    from bishop_ray.registry.gate_cases import kept_rows

    metrics = [version.tags.get("bishop.metric", "") for version in (new, old)]
    if metrics[0] != metrics[1]:
        raise UserError(f"the metrics differ: {metrics[0]!r} and {metrics[1]!r}")
    for version in (new, old):
        if not version.tags.get("bishop.validation"):
            raise UserError(f"no predictions of validation rows lie with version {version.version}")
    if new.tags["bishop.validation"] != old.tags["bishop.validation"]:
        raise UserError(f"versions {new.version} and {old.version} were selected on different validation rows")
    sides = [_predictions(new, uri) if validation is None else validation, _predictions(old, uri)]
    if sides[0].key != sides[1].key or len(kept := kept_rows(sides[0].scored)) != len(sides[1].scored):
        raise UserError(f"the stored predictions of versions {new.version} and {old.version} are of different rows")
    try:
        return paired_bootstrap(metrics[0], task_of(new), kept, sides[1].scored)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"the stored predictions cannot be scored: {error}") from None


def score_of(version: ModelVersion) -> float | None:
    """Its validation score, None where none can be read."""
    try:
        return float(version.tags["val_score"])
    except (KeyError, ValueError):
        return None


def task_of(version: ModelVersion) -> TaskType:
    """The task that it was trained for.

    Raises:
        UserError: It does not say.
    """
    try:
        return TaskType(version.tags["task"])
    except (KeyError, ValueError):
        raise UserError(f"version {version.version} does not say its task") from None


def _search(version: ModelVersion) -> str:
    return version.tags.get("bishop.search") or version.tags.get("bishop.study_id", "")


def _predictions(version: ModelVersion, uri: str) -> Validation:
    from bishop_ray.registry.gate_cases import read_validation

    with tempfile.TemporaryDirectory(prefix="bishop-gate-") as scratch:
        found = read_validation(fetch(uri, version.name, str(version.version), Path(scratch), FOLDER))
    if found is None:
        raise UserError(f"no predictions of validation rows lie with version {version.version}")
    return found
