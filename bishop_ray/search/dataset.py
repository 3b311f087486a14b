"""Dataset of a study: loaded, checked, split, prepared; its test rows opened once after the search."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from optuna.trial import TrialState

from bishop_ray.config import StudyConfig
from bishop_ray.data.doctor import warnings_of
from bishop_ray.data.doctor.findings import Finding, shortened
from bishop_ray.data.load import load_dataset
from bishop_ray.data.preprocess import Preprocessor, counted, encoded
from bishop_ray.data.split import split_dataset
from bishop_ray.data.table import RawDataset, Split
from bishop_ray.data.target import TargetCoder
from bishop_ray.errors import BadTable
from bishop_ray.metrics import METRICS, check_metric, default_metric, evaluate
from bishop_ray.models import model_class
from bishop_ray.search.study import OpenStudy
from bishop_ray.training.baselines import reference_scores
from bishop_ray.training.job import StudyData


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
    return Prepared(data, preprocessor, loaded.fingerprint, example, loaded.validation, loaded.rows)


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


FINDINGS = "bishop.findings"
"""The tag of a study's parent run: a JSON list of findings, each with ``kind``, ``column``, ``detail``, ``action``."""
LONGEST = 4000
"""Characters of the tag; MLflow takes 8,000."""
_SHOWN = 3
logger = logging.getLogger(__name__)


def check_table(config: StudyConfig, studies: Iterable[OpenStudy], loaded: Loaded) -> dict[str, str]:
    """Tags with what training and validation rows tell of the table, and a line on the screen for each finding.

    It only reports: whatever it finds, or fails at, the search goes on.

    Args:
        config: The study, or one of a search over several models.
        studies: All studies of the search. Where one has begun nothing is done: it was told then.
        loaded: Training and validation rows.
    """
    if not config.doctor or any(_begun(study) for study in studies):
        return {}
    try:
        found = warnings_of(loaded.train, loaded.validation)
    except Exception as error:  # a search is worth more than a look at its table
        logger.warning("%s: the table was not looked at: %s: %s", config.ref.key, type(error).__name__, error)
        return {}
    for finding in shortened(found, _SHOWN):
        logger.warning("%s: %s", config.ref.key, finding.line())
    return {FINDINGS: as_tag(found)}


def as_tag(findings: Sequence[Finding]) -> str:
    """As JSON of at most `LONGEST` characters; what does not fit is counted in a last entry."""
    rows = [asdict(finding) for finding in findings]
    for kept in range(len(rows), -1, -1):
        more = [{"more": len(rows) - kept}] if kept < len(rows) else []
        text = json.dumps(rows[:kept] + more)
        if len(text) <= LONGEST:
            break
    return text


def _begun(study: OpenStudy) -> bool:
    return any(trial.state != TrialState.WAITING for trial in study.study.get_trials(deepcopy=False))
