"""A whole search behind `fit`: Ray Tune, Optuna and MLflow as in ``jobs/tune.py``, the winner behind `predict`."""

from __future__ import annotations

import hashlib
import io
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray
from sklearn.utils import check_random_state
from tqdm.auto import tqdm

from bishop_ray import cli
from bishop_ray.cli.plan import check_metric_fits, check_search, chosen_models, studies
from bishop_ray.config import NO_LIMIT, StudyConfig, StudyResult
from bishop_ray.data.columns import canonical_text
from bishop_ray.data.refs import NO_ROLES, DatasetRef, Roles, file_ref
from bishop_ray.paths import replacing_file
from bishop_ray.registry import load_best
from bishop_ray.search.callback import Progress
from bishop_ray.search.cluster import connect, shared_slots
from bishop_ray.search.suite import run_studies
from bishop_ray.sklearn.estimators import Classifier, Regressor, Tabular
from bishop_ray.sklearn.input_validation import as_value_error, with_target
from bishop_ray.tracking import check_tracking


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
        with as_value_error(), self._folder() as storage:
            ref = _write_table(storage / "tables", frame, y, self._task, weights)
            results = self._search(ref, storage, seed)
            best = results[0]
            self.predictor_ = load_best(best.registered, str(best.version), self._uri(storage))
        self.results_ = results
        self.best_params_ = dict(best.params)
        self.best_score_, self.test_score_ = best.val_score, best.test_mean

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        if self.storage is not None:
            yield Path(self.storage).expanduser().resolve()
            return
        with tempfile.TemporaryDirectory(prefix="bishop-tuned-") as folder:
            yield Path(folder)

    def _uri(self, storage: Path) -> str:
        return self.tracking_uri or f"sqlite:///{storage / 'mlflow.db'}"

    def _search(self, ref: DatasetRef, storage: Path, seed: int) -> list[StudyResult]:
        args = self._flags(ref, seed)
        deadline = time.time() + args.time_budget if args.time_budget else 0.0
        models = chosen_models(args.models)
        check_search(args, models)
        check_metric_fits(args.metric, [ref])
        check_tracking(self._uri(storage))  # it also imports mlflow, which two threads at once cannot
        cluster = connect(self.ray_address or "")
        configs = studies(args, [ref], models, storage, self._uri(storage), cluster)
        slots = shared_slots(cluster, [config.resources for config in configs], args.max_concurrent)
        total = configs[0].trials if configs[0].trials < NO_LIMIT else None
        ended: dict[str, int] = {}
        with tqdm(total=total, unit="trial", disable=not self.verbose) as bar:

            def listen(config: StudyConfig, progress: Progress) -> None:
                ended[config.model] = progress.finished
                bar.set_postfix_str(progress.last, refresh=False)
                bar.update(sum(ended.values()) - bar.n)

            try:
                results, failures, _ = run_studies([configs], slots, listen, deadline)
            except KeyboardInterrupt:
                # The same studies with the trials they have: nothing is searched, the best so far is evaluated.
                have = [replace(config, trials=max(1, sum(ended.values())), time_budget=0.0) for config in configs]
                results = run_studies([have], slots, listen)[0] if any(ended.values()) else []
                if not results:
                    raise
                failures = []
        if not results:
            raise RuntimeError("; ".join(failure.reason for failure in failures) or "no model can do such data")
        return sorted(results, key=lambda result: result.val_score, reverse=True)

    def _flags(self, ref: DatasetRef, seed: int) -> Any:
        """The parsed flags of the same search by ``jobs/tune.py``."""
        models = [self.models] if isinstance(self.models, str) else list(self.models)
        line = ["--table", ref.locator, "--target", ref.target, "--seed", str(seed), "--models", *models]
        for flag in ("trials", "time_budget", "max_epochs", "metric", "max_concurrent"):
            if (value := getattr(self, flag)) is not None:
                line += ["--" + flag.replace("_", "-"), str(value)]
        return cli.tune_parser().parse_args(line)


def _write_table(
    folder: Path, frame: pd.DataFrame, y: NDArray[Any], task: str, weights: NDArray[np.float64] | None
) -> DatasetRef:
    """The rows as a file named after them, so that the same fit finds its study again."""
    both, target = with_target(frame, y)
    roles = NO_ROLES
    if weights is not None:
        both, name = with_target(both, weights)
        roles = Roles(weights=name)
    hashes = pd.util.hash_pandas_object(both.astype("string"), index=False).to_numpy()
    digest = hashlib.sha256(repr((list(both.columns), list(map(str, both.dtypes)))).encode() + hashes.tobytes())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"table-{digest.hexdigest()[:12]}.parquet"
    if not path.is_file():
        with replacing_file(path) as part:
            if not _stored(both, part):
                _as_texts(both).to_parquet(part)
    return replace(file_ref(path, target, task), roles=roles)


def _stored(frame: pd.DataFrame, file: Path | io.BytesIO) -> bool:
    """Writes the frame as Parquet, if that can hold it."""
    try:
        frame.to_parquet(file)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return False
    return True


def _as_texts(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with what Parquet cannot hold, such as numbers and texts in one column, as the texts it is read as."""
    columns = {}
    for name in frame.columns:
        series = frame[name]
        if not _stored(series.to_frame(name), io.BytesIO()):
            series = pd.Series([canonical_text(value) for value in series], dtype=object)
        columns[name] = series
    return pd.DataFrame(columns)


class TunedClassifier(Classifier, TunedEstimator):
    """The best classifier that a search finds; parameters as `TunedEstimator`."""


class TunedRegressor(Regressor, TunedEstimator):
    """The best regressor that a search finds; parameters as `TunedEstimator`."""
