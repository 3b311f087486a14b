"""What the three boosters share: early stopping, reports after chunks of rounds, and the frame around `predict`."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bishop_ray.data.table import Table, TableSpec
from bishop_ray.models.base import Array, Estimator
from bishop_ray.models.validation import check_whole

N_ROUNDS = 2000
"""Cap of rounds where a search space has none. Gorishniy et al. 2021 ("Revisiting Deep Learning Models for Tabular
Data", appendix), whose XGBoost and CatBoost spaces the paper's resemble, give 2,000 with early stopping after 50."""
PATIENCE = 50


class EarlyStopping:
    """Judges one training round by round: reports chunks, stops early, knows the best round.

    Args:
        rounds: The most rounds that may come.
        patience: Rounds without a lower validation loss before training stops.
        reports: Chunks of a full training.
        on_round: As `Estimator.fit` has it.
    """

    def __init__(self, rounds: int, patience: int, reports: int, on_round: Callable[[int, Array], bool]) -> None:
        self.best_round = 1
        self.done = 0
        self._best_loss = math.inf
        self._rounds, self._patience, self._on_round = rounds, patience, on_round
        self._chunk = math.ceil(rounds / reports)

    def ends_chunk(self, done: int) -> bool:
        """Whether a report is due after `done` rounds."""
        return done % self._chunk == 0 and done < self._rounds

    def stops(self, done: int, loss: float, prediction: Callable[[], Array]) -> bool:
        """Whether training ends after `done` rounds with this validation loss; asks for a prediction only to report."""
        self.done = done
        if loss < self._best_loss:
            self.best_round, self._best_loss = done, loss
        if done - self.best_round >= self._patience:
            return True
        return self.ends_chunk(done) and self._on_round(done, prediction())


class Boosted(Estimator):
    """An `Estimator` of boosted trees; subclasses name the library's calls."""

    reports: ClassVar[int] = 20
    takes_weights: ClassVar[bool] = True
    trained_rounds: int = 0
    """Rounds that the last training took, those after the best one included."""

    def __init__(self, spec: TableSpec, n_rounds: int, patience: int) -> None:
        check_whole(1, n_rounds=n_rounds, patience=patience)
        self.spec = spec
        self._max_rounds = n_rounds
        self._patience = patience
        self._booster: Any = None

    @abstractmethod
    def _raw(self, x_num: Array, x_cat: NDArray[np.int64]) -> NDArray[Any]:
        """The library's prediction of R >= 1 rows: see `as_output`."""

    def fit(self, train: Table, val: Table, on_round: Callable[[int, Array], bool]) -> None:
        """See `Estimator.fit`."""
        watch = EarlyStopping(self._max_rounds, self._patience, self.reports, on_round)
        self._train(train, self._max_rounds, val, watch)
        self.rounds, self.trained_rounds = watch.best_round, watch.done

    def refit(self, train: Table, rounds: int) -> None:
        """See `Estimator.refit`."""
        self._train(train, rounds, None, None)
        self.rounds = self.trained_rounds = rounds

    @abstractmethod
    def _train(self, train: Table, rounds: int, val: Table | None, watch: EarlyStopping | None) -> None:
        """Fits `rounds` rounds, or as many as `watch` lets pass."""

    def predict(self, x_num: Array, x_cat: NDArray[np.int64]) -> Array:
        """See `Estimator.predict`."""
        if not len(x_num):
            return np.zeros((0, self.spec.n_out), np.float32)
        return as_output(self._raw(x_num, x_cat), self.spec)


def as_output(raw: NDArray[Any], spec: TableSpec) -> Array:
    """(R, K) float32 from what the libraries give: (R,) probabilities of class 1, (R, K) of all, or (R,) targets."""
    if not spec.task.is_classification:
        return raw.reshape(-1, 1).astype(np.float32)
    if spec.n_out == 2 and raw.ndim == 1:
        raw = np.stack([1.0 - raw, raw], axis=1)
    return raw.astype(np.float32)


def joined(x_num: Array, x_cat: NDArray[np.int64]) -> Array:
    """(R, N + C) float32: the numbers, then the codes (exact below 2^24) with 0, unknown or missing, as NaN."""
    codes = x_cat.astype(np.float32)
    codes[x_cat == 0] = np.nan
    return np.hstack([x_num, codes])


def within(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    """Nothing, if `value` lies in the range.

    Raises:
        ValueError: It does not; one line.
    """
    if not (low < value if open_low else low <= value) or not value <= high:
        bracket = "(" if open_low else "["
        raise ValueError(f"{name} must lie in {bracket}{low:g}, {high:g}]; found {value}")
