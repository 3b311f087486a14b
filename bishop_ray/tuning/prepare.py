"""From a dataset's name to the rows a search may see, and, once it is over, to the test rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bishop_ray.config import StudyConfig
from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.sources import load_dataset
from bishop_ray.data.split import split_dataset
from bishop_ray.data.table import RawDataset, Split
from bishop_ray.data.target import TargetCoder
from bishop_ray.data.weighting import counted, encoded
from bishop_ray.errors import BadTable
from bishop_ray.metrics import METRICS, check_metric, default_metric, evaluate
from bishop_ray.models import model_class
from bishop_ray.training.reference import reference_scores
from bishop_ray.training.trial import StudyData


@dataclass(frozen=True)
class Prepared:
    """A study's data without its test rows.

    Attributes:
        data: What trials train on.
        preprocessor: Fitted on the training rows.
        fingerprint: Hash of the whole dataset, test rows included, and of the split.
        example: A few raw training rows, as a request would bring them.
        rows: Rows of train, validation and test.
    """

    data: StudyData
    preprocessor: Preprocessor
    fingerprint: str
    example: RawDataset
    rows: tuple[int, int, int]


@dataclass(frozen=True)
class Loaded:
    """A dataset that was read and split, before anything was fitted."""

    config: StudyConfig
    train: RawDataset
    validation: RawDataset
    fingerprint: str
    rows: tuple[int, int, int]


def load(config: StudyConfig) -> Loaded:
    """Reads and splits (`divide`).

    Returns:
        The parts the search may see, and the configuration with its metric filled in.

    Raises:
        UserError: The data cannot be loaded or trained on, or the metric does not fit its task.
    """
    return divide(config, load_dataset(config.ref))


def divide(config: StudyConfig, raw: RawDataset) -> Loaded:
    """Splits what was read; the test part is dropped here and opened again by `open_test` only.

    Raises:
        UserError: The table cannot be split, or the metric does not fit its task.
    """
    metric = config.metric or default_metric(raw.task, suite=config.ref.kind == "openml")
    check_metric(metric, raw.task)
    parts = _split(config, raw)
    rows = (len(parts.train), len(parts.validation), len(parts.test))
    if metric == "auc":
        _both_classes(config, parts)
    elif metric not in METRICS:
        _check_defined(config, metric, parts)
    return Loaded(replace(config, metric=metric), parts.train, parts.validation, raw.fingerprint(), rows)


def prepare(loaded: Loaded) -> Prepared:
    """Encodes; everything is fitted on the training rows.

    Raises:
        UserError: No column is left to learn from.
    """
    ref = loaded.config.ref
    try:
        preprocessor = Preprocessor.fit(loaded.train, model_class(loaded.config.model).numeric)
    except BadTable as error:
        raise BadTable(f"{ref.locator}: {error}" if ref.kind == "file" else str(error)) from None
    data = StudyData(
        preprocessor.spec,
        encoded(preprocessor, loaded.train, ref.roles.balance),
        preprocessor.transform(loaded.validation),
        preprocessor.to_dict(),
        preprocessor.target.units,
    )
    example = loaded.train.rows(np.arange(min(5, loaded.rows[0])))
    return Prepared(data, preprocessor, loaded.fingerprint, example, loaded.rows)


def unable(config: StudyConfig, prepared: Prepared) -> str:
    """Why the model of `config` cannot be trained on the data, or ""."""
    found = model_class(config.model)
    if config.ref.roles.weighted and not found.takes_weights:
        flag = "--weights" if config.ref.roles.weights else "--balance"
        return f"{config.model} cannot take row weights ({flag})"
    return found.cannot(prepared.data.spec, len(prepared.data.train))


def combined(config: StudyConfig) -> tuple[RawDataset, RawDataset]:
    """Train and validation rows as one table, and the validation rows: what a refit trains on and watches."""
    parts = _split(config, load_dataset(config.ref))
    return counted(parts.train.joined(parts.validation)), parts.validation


def test_references(config: StudyConfig, test: RawDataset) -> dict[str, float]:
    """Test scores of the constant prediction ("mean") and of a linear model ("linear") of the training rows."""
    train = _split(config, load_dataset(config.ref)).train
    preprocessor = Preprocessor.fit(train, "normal")
    tables = encoded(preprocessor, train, config.ref.roles.balance), preprocessor.transform(test)
    return reference_scores(*tables, preprocessor.spec, config.metric, scale=preprocessor.target.units)


def open_test(config: StudyConfig) -> RawDataset:
    """The test rows; called once per study, after its search ended."""
    return _split(config, load_dataset(config.ref)).test


def _both_classes(config: StudyConfig, parts: Split[RawDataset]) -> None:
    """AUC is not defined on one class; better said now than after the search."""
    for name, part in (("validation", parts.validation), ("test", parts.test)):
        if part.target.nunique() < 2:
            raise BadTable(
                f"{config.ref.locator}: the {name} part ({len(part)} rows) holds one class only, and auc needs two; "
                f"expected at least 3 rows of each class, a larger part (--split) or another --metric"
            )


def _check_defined(config: StudyConfig, metric: str, parts: Split[RawDataset]) -> None:
    """A scorer of scikit-learn scores the right answers of either part; where it cannot, better said now."""
    coder = TargetCoder.fit(parts.train.target, parts.train.task)
    for name, part in (("validation", parts.validation), ("test", parts.test)):
        y = coder.encode(part.target)
        right = np.eye(coder.n_out)[y] if coder.task.is_classification else y
        try:
            evaluate(metric, coder.task, y, right, scale=coder.units)
        except BadTable as error:
            raise BadTable(
                f"{config.ref.locator}: the {name} part ({len(part)} rows): {error}; expected another --metric or, "
                "where classes lack, a larger part (--split)"
            ) from None


def _split(config: StudyConfig, raw: RawDataset) -> Split[RawDataset]:
    try:
        parts = split_dataset(raw, config.seed, config.split.fractions, config.split.max_rows)
        return replace(parts, train=counted(parts.train))
    except BadTable as error:
        # The split knows the table's name only; a person looks for the file.
        raise BadTable(f"{config.ref.locator}: {error}" if config.ref.kind == "file" else str(error)) from None
