"""From a dataset's name to the rows a search may see, and, once it is over, to the test rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from bishop_ray.config import StudyConfig
from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.sources import load_dataset
from bishop_ray.data.split import split_dataset
from bishop_ray.data.table import RawDataset, Split
from bishop_ray.errors import BadTable
from bishop_ray.models import model_class
from bishop_ray.training.metrics import check_metric, default_metric
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
        validation: The raw validation rows.
        rows: Rows of train, validation and test.
    """

    data: StudyData
    preprocessor: Preprocessor
    fingerprint: str
    example: RawDataset
    validation: RawDataset
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
        preprocessor.transform(loaded.train),
        preprocessor.transform(loaded.validation),
        preprocessor.to_dict(),
        preprocessor.target.scale,
    )
    example = loaded.train.rows(np.arange(min(5, loaded.rows[0])))
    return Prepared(data, preprocessor, loaded.fingerprint, example, loaded.validation, loaded.rows)


def unable(config: StudyConfig, prepared: Prepared) -> str:
    """Why the model of `config` cannot be trained on the data, or ""."""
    return model_class(config.model).cannot(prepared.data.spec, len(prepared.data.train))


def combined(config: StudyConfig) -> tuple[RawDataset, RawDataset]:
    """Train and validation rows as one table, and the validation rows: what a refit trains on and watches."""
    parts = _split(config, load_dataset(config.ref))
    frame = pd.concat([parts.train.frame, parts.validation.frame], ignore_index=True)
    target = pd.concat([parts.train.target, parts.validation.target], ignore_index=True)
    both = RawDataset(parts.train.name, frame, target, parts.train.task, parts.train.categorical)
    return both, parts.validation


def test_references(config: StudyConfig, test: RawDataset) -> dict[str, float]:
    """Test scores of the constant prediction ("mean") and of a linear model ("linear") of the training rows."""
    train = _split(config, load_dataset(config.ref)).train
    preprocessor = Preprocessor.fit(train, "normal")
    tables = preprocessor.transform(train), preprocessor.transform(test)
    return reference_scores(*tables, preprocessor.spec, config.metric, scale=preprocessor.target.scale)


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


def _split(config: StudyConfig, raw: RawDataset) -> Split[RawDataset]:
    try:
        return split_dataset(raw, config.seed, config.split.fractions, config.split.max_rows)
    except BadTable as error:
        # The split knows the table's name only; a person looks for the file.
        raise BadTable(f"{config.ref.locator}: {error}" if config.ref.kind == "file" else str(error)) from None
