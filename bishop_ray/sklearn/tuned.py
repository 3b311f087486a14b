"""A whole search behind `fit`: Ray Tune, Optuna and MLflow as in ``jobs/tune.py``, the winner behind `predict`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sklearn.utils import check_random_state

from bishop_ray.search.tuner import SearchResult, tune
from bishop_ray.sklearn.estimators import Classifier, Regressor, Tabular
from bishop_ray.sklearn.input_validation import with_target


class TunedEstimator(Tabular):
    """What classifier and regressor have in common.

    The first Ctrl-C ends the search: the best trial so far is evaluated and becomes the model. A second one ends `fit`.

    A parameter that is None has the default of ``jobs/tune.py``'s flag of that name, which also says what it means.
    The search keeps a tenth of the rows as test split, opened once at its end, and a fifth for validation.

    Args:
        models: A name of the registry of models, several, or "all".
        trials: Trials of the search, of all models together.
        time_budget: Of the whole fit, such as "10m" or "1h".
        max_epochs: Of a trial of a network.
        metric: What is selected by.
        max_concurrent: Trials at a time.
        ray_address: Cluster to join; by default Ray is started in this process, and stays.
        storage: Folder of studies, checkpoints and MLflow's store. The same fit again goes on where it was, or is
            finished at once. None: a private folder that is removed after the fit.
        tracking_uri: MLflow address; by default a database in `storage`.
        random_state: Draws the seed of split, sampler and trials: an int, a RandomState or None.
        verbose: 1 shows a bar of trials on standard error.

    Attributes:
        results_: A `StudyResult` per model, the best one first.
        best_params_: Hyperparameters of the winner.
        best_score_: Its validation score, larger is better.
        test_score_: Its score on the test split: mean over the evaluation's seeds.
    """

    def __init__(
        self,
        *,
        models: str | Sequence[str] = "bishop",
        trials: int | None = None,
        time_budget: str | None = None,
        max_epochs: int | None = None,
        metric: str | None = None,
        max_concurrent: int | None = None,
        ray_address: str | None = None,
        storage: str | None = None,
        tracking_uri: str | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: int = 0,
    ) -> None:
        self.models = models
        self.trials = trials
        self.time_budget = time_budget
        self.max_epochs = max_epochs
        self.metric = metric
        self.max_concurrent = max_concurrent
        self.ray_address = ray_address
        self.storage = storage
        self.tracking_uri = tracking_uri
        self.random_state = random_state
        self.verbose = verbose

    def _fit(self, frame: pd.DataFrame, y: NDArray[Any], weights: NDArray[np.float64] | None = None) -> None:
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        with self._folder() as storage:
            found = self._search(*_joined(frame, y, weights), storage, seed)
            self.predictor_ = found.predictor
        self.results_ = list(found.results)
        self.best_params_ = dict(found.best.params)
        self.best_score_, self.test_score_ = found.best.val_score, found.best.test_mean

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        if self.storage is not None:
            yield Path(self.storage).expanduser().resolve()
            return
        with tempfile.TemporaryDirectory(prefix="bishop-tuned-") as folder:
            yield Path(folder)

    def _search(self, table: pd.DataFrame, target: str, weights: str, storage: Path, seed: int) -> SearchResult:
        return tune(
            table, target, models=self.models, trials=self.trials, time_budget=self.time_budget, metric=self.metric,
            max_epochs=self.max_epochs, max_concurrent=self.max_concurrent, ray_address=self.ray_address or "",
            task_type=self._task, weights=weights, seed=seed, storage=storage,
            tracking_uri=self.tracking_uri or f"sqlite:///{storage / 'mlflow.db'}", verbose=self.verbose,
        )  # fmt: skip


def _joined(frame: pd.DataFrame, y: NDArray[Any], weights: NDArray[np.float64] | None) -> tuple[pd.DataFrame, str, str]:
    """One table, the name of its target column, and that of its weights, "" for none."""
    table, target = with_target(frame, y)
    if weights is None:
        return table, target, ""
    table, name = with_target(table, weights)
    return table, target, name


class TunedClassifier(Classifier, TunedEstimator):
    """The best classifier that a search finds; parameters as `TunedEstimator`."""


class TunedRegressor(Regressor, TunedEstimator):
    """The best regressor that a search finds; parameters as `TunedEstimator`."""
