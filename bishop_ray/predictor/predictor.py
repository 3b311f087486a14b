"""Predictor: one preprocessor with one fitted model, reading the user's own table.

On disk a folder without pickle: ``predictor.json``, and ``weights.safetensors`` of a network or a folder ``model`` of
an estimator. It loads on a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from bishop_ray.data.columns import canonical_text
from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.table import TableSpec, TaskType
from bishop_ray.data.target import TargetCoder
from bishop_ray.errors import UserError
from bishop_ray.models import create_model
from bishop_ray.models.base import Estimator, Network
from bishop_ray.predictor.storage import (
    DAMAGE,
    MANIFEST,
    load_model,
    read_manifest,
    replacing,
    save_model,
    words,
    write_manifest,
)

if TYPE_CHECKING:
    from bishop_ray.predictor.explanation import Explanation


@dataclass(frozen=True)
class Answers:
    """Predictions of R rows.

    Attributes:
        predictions: (R,) labels in the user's own type, or the target in its own units.
        probabilities: (R, K) float64 in the order of `labels`; None for regression.
        labels: The K labels as text; empty for regression.
    """

    predictions: pd.Series
    probabilities: NDArray[np.float64] | None
    labels: tuple[str, ...]


def label_texts(predictor: Predictor) -> tuple[str, ...]:
    """The labels of a classification as text, in training order; empty for regression."""
    return tuple(map(label_text, predictor.target.classes))


def label_text(label: Any) -> str:
    """A label as text: of a text its very letters, "1.0" too."""
    return label if isinstance(label, str) else str(canonical_text(label))


def answers(predictor: Predictor, frame: pd.DataFrame) -> Answers:
    """Labels and probabilities, or numbers, of R rows.

    Args:
        predictor: The fitted predictor.
        frame: R rows, as `Predictor.output` takes them.

    Raises:
        UserError: As `Predictor.output`, or the model's result of some row is not finite.
    """
    output = predictor.output(frame)
    if bad := int((~np.isfinite(output)).any(axis=1).sum()):
        raise UserError(f"{predictor.model_name} has no finite prediction for {bad} of {len(frame)} rows")
    if not predictor.task.is_classification:
        values: Any = predictor.target.inverse(output)
        return Answers(pd.Series(values, name=predictor.target.name), None, ())
    labels = predictor.target.labels(output)
    return Answers(labels, np.asarray(output, np.float64), label_texts(predictor))


@dataclass(frozen=True)
class Encoded:
    """R rows by one preprocessor.

    Attributes:
        x_num: (R, N).
        x_cat: (R, C).
        num: Positions in x_num by column: of points in time several, of some numbers the missing indicator too.
        cat: Position in x_cat by column.
    """

    x_num: NDArray[np.float32]
    x_cat: NDArray[np.int64]
    num: dict[str, list[int]]
    cat: dict[str, list[int]]

    def taken(self, rows: Mapping[str, NDArray[np.int64]]) -> Encoded:
        """The rows with each named column's values taken from the rows (R,) given for it; others stay."""
        x_num, x_cat = self.x_num.copy(), self.x_cat.copy()
        for column, source in rows.items():
            for place in self.num.get(column, ()):
                x_num[:, place] = self.x_num[source, place]
            for place in self.cat.get(column, ()):
                x_cat[:, place] = self.x_cat[source, place]
        return Encoded(x_num, x_cat, self.num, self.cat)


def encode(preprocessor: Preprocessor, frame: pd.DataFrame) -> Encoded:
    """The frame's R rows.

    Raises:
        BadTable: As `Preprocessor.transform_features`.
    """
    x_num, x_cat = preprocessor.transform_features(frame)
    num: dict[str, list[int]] = {}
    indicators = [column for column in preprocessor.numbers if column.indicator]
    for place, column in enumerate((*preprocessor.numbers, *indicators)):
        num.setdefault(column.name, []).append(place)
    cat = {column.name: [place] for place, column in enumerate(preprocessor.categories)}
    return Encoded(x_num, x_cat, num, cat)


ENSEMBLE = "ensemble"
"""Name of a predictor made of several; no name of the registry of models."""


@dataclass(frozen=True)
class Predictor:
    """A fitted model that reads the user's own table.

    Attributes:
        preprocessor: Fitted on the training rows.
        model: The fitted model, built from ``preprocessor.spec`` and `hparams`.
        model_name: Its name in the registry of models.
        hparams: Arguments of its constructor.
        info: Anything worth keeping: dataset, seed, scores. JSON values.
    """

    preprocessor: Preprocessor
    model: Network | Estimator
    model_name: str
    hparams: dict[str, Any]
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> TargetCoder:
        """The target's coder: labels, units."""
        return self.preprocessor.target

    @property
    def task(self) -> TaskType:
        """The task type."""
        return self.target.task

    @property
    def schema(self) -> tuple[tuple[str, str], ...]:
        """The columns a frame must have, in training order: name and kind ("number", "moment", "category")."""
        return self.preprocessor.schema

    @property
    def levels(self) -> dict[str, tuple[str, ...]]:
        """The category texts seen in training, by column."""
        return {column.name: column.levels for column in self.preprocessor.categories}

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names, in the registry of models, of what predicts; each once."""
        return (self.model_name,)

    @property
    def metric(self) -> str:
        """The metric that selected the model, or "" where that is not known."""
        return str(self.info.get("metric", ""))

    def output(self, frame: pd.DataFrame) -> NDArray[Any]:
        """Class probabilities (R, K) in the order of ``target.classes``, or the standardised target (R, 1).

        Args:
            frame: R rows; columns are found by name, further ones are ignored. R = 0 is allowed.

        Raises:
            UserError: A column is missing, or cannot be read as the numbers it held in training.
        """
        return self.output_of(self.encoded(frame))

    def encoded(self, frame: pd.DataFrame) -> list[Encoded]:
        """The R rows, once per preprocessor that differs from the others; raises as `output`."""
        return [encode(self.preprocessor, frame)]

    def models_of(self, parts: Sequence[Encoded]) -> Iterator[tuple[Network | Estimator, float, Encoded]]:
        """Each model with its share of the output and the rows that it reads, of what `encoded` gave."""
        yield self.model, 1.0, parts[0]

    def output_of(self, parts: Sequence[Encoded]) -> NDArray[Any]:
        """`output` of rows that are encoded already."""
        return self.model.predict(parts[0].x_num, parts[0].x_cat)

    def predict(self, frame: pd.DataFrame) -> pd.Series:
        """The likeliest labels in the user's own type, or the target in its own units (float64).

        Args:
            frame: R rows, as `output`.

        Returns:
            (R,) with the frame's index and the target's name.

        Raises:
            UserError: As `output`.
        """
        output = self.output(frame)
        if self.task.is_classification:
            series = self.target.labels(output)
        else:
            series = pd.Series(self.target.inverse(output), name=self.target.name)
        series.index = frame.index
        return series

    def predict_proba(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Class probabilities (R, K) with the frame's index; columns are the labels in training order.

        Raises:
            UserError: The task is a regression, or as `predict`.
        """
        if not self.task.is_classification:
            raise UserError(f"predict_proba: the target {self.target.name!r} is a number; use predict")
        columns = pd.Index(list(self.target.classes), name=self.target.name)
        return pd.DataFrame(self.output(frame), index=frame.index, columns=columns)

    def explain(
        self,
        frame: pd.DataFrame,
        target: pd.Series | str | Sequence[Any] | None = None,
        *,
        metric: str = "",
        repeats: int = 5,
        max_rows: int = 2000,
        seed: int = 0,
    ) -> Explanation:
        """What predictions of these rows depend on: permutation importance per column; of BiSHop also its attention.

        A column's values are exchanged among the rows, `repeats` times: with targets the importance is what the metric
        loses, without it is how far the output moves. Columns that carry the same information stand in for each other,
        and each then looks less important than both together.

        Args:
            frame: R rows, as `output` takes them; better none the model was trained on.
            target: The rows' targets: a column of `frame`, or a value per row with its index. None: they are not known.
            metric: Judges with targets: the one that selected the model, else AUC or R², unless it is named.
            repeats: Exchanges per column.
            max_rows: Of more rows a random sample of so many is used.
            seed: Of sample and exchanges; the same seed gives the same result.

        Raises:
            UserError: No rows, a column is missing or cannot be read, a target that does not fit the rows or the model,
                or a metric that is unknown or undefined for these rows.
        """
        from bishop_ray.predictor.explanation import explain

        return explain(self, frame, target, metric=metric, repeats=repeats, max_rows=max_rows, seed=seed)

    def save(self, folder: Path | str) -> Path:
        """Writes the folder (replacing an earlier one) and returns it; nobody ever sees half of it."""
        folder = Path(folder)
        with replacing(folder) as building:
            self._write(building)
        return folder

    @classmethod
    def load(cls, folder: Path | str) -> Predictor:
        """The predictor of a folder, on the CPU, in evaluation mode; nothing in the folder is executed.

        Returns:
            A `Predictor`, or an `EnsemblePredictor` where the folder holds one.

        Raises:
            UserError: No such folder, a missing, damaged or newer file, weights that do not fit the model.
        """
        from bishop_ray.predictor.ensemble_predictor import load_ensemble

        folder = Path(folder)
        manifest = read_manifest(folder / MANIFEST)
        if manifest.get("model") == ENSEMBLE:
            return load_ensemble(folder, manifest)
        return _load(folder, manifest)

    def _write(self, folder: Path) -> None:
        """Fills the existing, empty `folder`."""
        write_manifest(
            folder,
            model=self.model_name,
            hparams=self.hparams,
            spec=_spec_dict(self.preprocessor.spec),
            preprocessor=self.preprocessor.to_dict(),
            weights_sha256=save_model(self.model, folder),
            info=self.info,
        )


def _load(folder: Path, manifest: dict[str, Any]) -> Predictor:
    try:
        name, hparams = str(manifest["model"]), dict(manifest["hparams"])
        preprocessor = Preprocessor.from_dict(manifest["preprocessor"])
        spec, digest = TableSpec(**manifest["spec"]), str(manifest["weights_sha256"])
        info, same = dict(manifest["info"]), spec == preprocessor.spec
    except UserError:
        raise
    except DAMAGE as error:
        raise UserError(f"{folder / MANIFEST}: damaged ({words(error)})") from error
    if not same:
        raise UserError(f"{folder / MANIFEST}: damaged (spec and preprocessor describe different tables)")
    with torch.random.fork_rng(devices=[]):  # building draws initial weights: the caller's random state stays
        try:
            model = create_model(name, spec, hparams)
        except UserError:
            raise
        except DAMAGE as error:
            raise UserError(f"{folder / MANIFEST}: no {name[:40]} can be built from it ({words(error)})") from error
    load_model(model, folder, digest)
    return Predictor(preprocessor, model, name, hparams, info)


def _spec_dict(spec: TableSpec) -> dict[str, Any]:
    return {
        "task": spec.task.value,
        "n_num": spec.n_num,
        "cat_cardinalities": list(spec.cat_cardinalities),
        "n_out": spec.n_out,
    }
