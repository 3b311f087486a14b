"""Predictor of an ensemble: a weighted mean of several predictors.

Letters: R rows, K outputs.

On disk a folder: ``predictor.json`` with members and weights, and ``members/00``, ``members/01``, ..., each the folder
of a predictor of its own.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.target import TargetCoder
from bishop_ray.errors import UserError
from bishop_ray.models.base import Estimator, Network
from bishop_ray.predictor.predictor import ENSEMBLE, Encoded, Predictor, encode
from bishop_ray.predictor.storage import DAMAGE, MANIFEST, fingerprint, words, write_manifest


def combine(outputs: Sequence[NDArray[Any]], weights: Sequence[float], classification: bool) -> NDArray[np.float64]:
    """The mean of outputs, row by row, over the models whose output of that row is finite.

    A model whose row is not finite is left out of that row and the other weights grow in proportion, so that one bad
    model spoils nothing and a row's result does not depend on the rows beside it.

    Args:
        outputs: Per model (R, K).
        weights: Per model, positive.
        classification: Outputs are probabilities: the rows of the mean are brought to sum 1.

    Returns:
        (R, K); NaN where no model has a finite row.
    """
    total = np.zeros(outputs[0].shape, np.float64)
    given = np.zeros((len(total), 1), np.float64)
    for output, weight in zip(outputs, weights, strict=True):
        good = np.isfinite(output).all(axis=1, keepdims=True)
        # Not a product: infinity times zero is NaN.
        total += np.where(good, output, 0.0).astype(np.float64) * weight
        given += good * weight
    if classification:
        given = np.where(given > 0, total.sum(axis=1, keepdims=True), 0.0)
    return np.divide(total, given, out=np.full_like(total, np.nan), where=given > 0)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnsembleMember:
    """A predictor of an ensemble.

    Attributes:
        key: What people know it by, e.g. the number of its trial.
        weight: Its share, positive.
        predictor: The predictor, no ensemble itself.
    """

    key: str
    weight: float
    predictor: Predictor

    @property
    def name(self) -> str:
        """Model and key."""
        return f"{self.predictor.model_name} {self.key}".strip()


@dataclass(frozen=True)
class EnsemblePredictor(Predictor):
    """The weighted mean of its members' outputs: probabilities, or the standardised target.

    A member whose output of a row is not finite is left out of that row, see `combine`. An ensemble has no
    `preprocessor` and no `model`: every member has its own.

    Attributes:
        members: At least one; weights sum to 1. All were fitted on the same training target, so that outputs mean the
            same.
        hparams: ``member_00``, ...: model, key and weight of each member.

    Raises:
        ValueError: No members, weights that are not shares, an ensemble as member, members with different targets.
    """

    members: tuple[EnsembleMember, ...] = field(kw_only=True)
    preprocessor: Preprocessor = field(init=False, repr=False, compare=False)
    model: Network | Estimator = field(init=False, repr=False, compare=False)
    model_name: str = field(default=ENSEMBLE, init=False)
    hparams: dict[str, Any] = field(init=False, compare=False)
    info: dict[str, Any] = field(default_factory=dict, kw_only=True)
    _groups: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        weights = [member.weight for member in self.members]
        if not all(weight > 0 for weight in weights) or not math.isclose(sum(weights), 1.0, abs_tol=1e-6):
            raise ValueError(f"weights of an ensemble must be positive with sum 1; found {weights}")
        for member in self.members:
            if isinstance(member.predictor, EnsemblePredictor):
                raise ValueError("a member of an ensemble cannot be an ensemble")
            if member.predictor.target != self.target:
                raise ValueError(f"{member.name} was fitted on another target than {self.members[0].name}")
        described = {
            f"member_{i:02d}": {"model": m.predictor.model_name, "key": m.key, "weight": m.weight}
            for i, m in enumerate(self.members)
        }
        object.__setattr__(self, "hparams", described)
        object.__setattr__(self, "_groups", _alike([member.predictor.preprocessor for member in self.members]))

    @property
    def target(self) -> TargetCoder:
        """The target's coder, which all members share."""
        return self.members[0].predictor.target

    @property
    def levels(self) -> dict[str, tuple[str, ...]]:
        """The category texts that any member saw in training, by column."""
        merged: dict[str, tuple[str, ...]] = {}
        for member in self.members:
            for name, levels in member.predictor.levels.items():
                merged[name] = tuple(dict.fromkeys(merged.get(name, ()) + levels))
        return merged

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names, in the registry of models, of what predicts; each once."""
        return tuple(dict.fromkeys(member.predictor.model_name for member in self.members))

    @property
    def schema(self) -> tuple[tuple[str, str], ...]:
        """The columns that any member needs, in training order: name and kind ("number", "moment", "category")."""
        merged: list[tuple[str, str]] = []
        for member in self.members:
            place = 0
            names = [name for name, _ in merged]
            for column in member.predictor.schema:
                if column[0] in names:
                    place = names.index(column[0]) + 1
                else:
                    merged.insert(place, column)
                    names.insert(place, column[0])
                    place += 1
        return tuple(merged)

    @property
    def metric(self) -> str:
        """The metric that selected the members, or "" where that is not known."""
        return super().metric or self.members[0].predictor.metric

    def output(self, frame: pd.DataFrame) -> NDArray[Any]:
        """Class probabilities (R, K) in the order of ``target.classes``, or the standardised target (R, 1); float64.

        Args:
            frame: R rows; columns are found by name, further ones are ignored. R = 0 is allowed.

        Raises:
            UserError: A column is missing, or cannot be read as the numbers it held in training; or no member has a
                finite output for some row.
        """
        return self.output_of(self.encoded(frame))

    def encoded(self, frame: pd.DataFrame) -> list[Encoded]:
        """The R rows, once per group of members with equal preprocessors; raises as `output`."""
        return [encode(self.members[group[0]].predictor.preprocessor, frame) for group in self._groups]

    def models_of(self, parts: Sequence[Encoded]) -> Iterator[tuple[Network | Estimator, float, Encoded]]:
        """Each member's model with its weight and the rows that it reads, in the order of the members."""
        read = {i: part for group, part in zip(self._groups, parts, strict=True) for i in group}
        for i, member in enumerate(self.members):
            yield member.predictor.model, member.weight, read[i]

    def output_of(self, parts: Sequence[Encoded]) -> NDArray[Any]:
        """`output` of rows that are encoded already."""
        ordered = [model.predict(part.x_num, part.x_cat) for model, _, part in self.models_of(parts)]
        mean = combine(ordered, [member.weight for member in self.members], self.task.is_classification)
        self._report_bad(ordered)
        if lost := int(np.isnan(mean).any(axis=1).sum()):
            raise UserError(f"ensemble: no member has a finite prediction for {lost} of {len(mean)} rows")
        return mean

    def _report_bad(self, outputs: list[NDArray[Any]]) -> None:
        for member, output in zip(self.members, outputs, strict=True):
            if bad := int((~np.isfinite(output)).any(axis=1).sum()):
                logger.warning("ensemble: %s left out of %d rows, its predictions are not finite", member.name, bad)

    def _write(self, folder: Path) -> None:
        for i, member in enumerate(self.members):
            member.predictor.save(_member_folder(folder, i))
        write_manifest(
            folder,
            model=ENSEMBLE,
            hparams=self.hparams,
            weights_sha256=_digest(folder, len(self.members)),
            info=self.info,
        )


def load_ensemble(folder: Path, manifest: dict[str, Any]) -> EnsemblePredictor:
    """The ensemble of a folder whose manifest says that it is one.

    Raises:
        UserError: As `Predictor.load`, for the ensemble or a member.
    """
    try:
        described = list(manifest["hparams"].values())
        keys = [(str(entry["key"]), float(entry["weight"])) for entry in described]
        digest, info = str(manifest["weights_sha256"]), dict(manifest["info"])
    except DAMAGE as error:
        raise UserError(f"{folder / MANIFEST}: damaged ({words(error)})") from error
    if not keys:
        raise UserError(f"{folder / MANIFEST}: damaged (an ensemble without members)")
    if _digest(folder, len(keys)) != digest:
        raise UserError(f"{folder / MANIFEST}: its members are not those it was written with (hash differs)")
    predictors = [Predictor.load(_member_folder(folder, i)) for i in range(len(keys))]
    members = tuple(EnsembleMember(key, weight, p) for (key, weight), p in zip(keys, predictors, strict=True))
    try:
        return EnsemblePredictor(members=members, info=info)
    except ValueError as error:
        raise UserError(f"{folder / MANIFEST}: damaged ({error})") from error


def _alike(preprocessors: list[Preprocessor]) -> tuple[tuple[int, ...], ...]:
    """Positions in groups with equal preprocessors, which need to read a frame once."""
    groups: list[list[int]] = []
    for i, preprocessor in enumerate(preprocessors):
        for group in groups:
            if preprocessors[group[0]] == preprocessor:
                group.append(i)
                break
        else:
            groups.append([i])
    return tuple(map(tuple, groups))


def _member_folder(folder: Path, position: int) -> Path:
    return folder / "members" / f"{position:02d}"


def _digest(folder: Path, members: int) -> str:
    """Of what the members compute."""
    prints = [fingerprint(_member_folder(folder, i)) for i in range(members)]
    return hashlib.sha256(" ".join(prints).encode()).hexdigest()
