"""Search from Python: `tune`, its result, and the opening of a search that every caller shares."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import optuna
import pandas as pd
from tqdm.auto import tqdm

from bishop_ray.config import NO_LIMIT, Skipped, StudyConfig, StudyResult
from bishop_ray.data.files import write_table
from bishop_ray.data.refs import DatasetRef, Roles, file_ref
from bishop_ray.errors import UnknownName
from bishop_ray.models import not_installed
from bishop_ray.paths import storage_folder
from bishop_ray.predictor import Predictor
from bishop_ray.registry import load_best
from bishop_ray.search.callback import Progress
from bishop_ray.search.cluster import Cluster, check_shared, connect, shared_slots
from bishop_ray.search.dataset import Loaded, load, prepare
from bishop_ray.search.leaderboard import leaderboard, render, score_words
from bishop_ray.search.options import SearchOptions
from bishop_ray.search.plan import check_metric_fits, check_options, plan_studies
from bishop_ray.search.space import load_space
from bishop_ray.search.study import known_study, open_database, stored_identity, trial_rows
from bishop_ray.search.suite import Failure, Listener, run_studies
from bishop_ray.tracking import check_tracking
from bishop_ray.tracking import tracking_uri as resolved_uri
from bishop_ray.tracking.query import Reader


@dataclass(frozen=True, repr=False)
class SearchResult:
    """What a search ended with.

    Attributes:
        results: A result per model, an ensemble among them, the best validation score first.
        skipped: Models that cannot do such data, with the reason.
        configs: The studies.
    """

    results: tuple[StudyResult, ...]
    skipped: tuple[Skipped, ...]
    configs: tuple[StudyConfig, ...]

    @property
    def best(self) -> StudyResult:
        """The result with the best validation score."""
        return self.results[0]

    @property
    def leaderboard(self) -> pd.DataFrame:
        """A row per model, the best validation score first; the columns that the command line writes as CSV."""
        return pd.DataFrame(leaderboard(self.results, self.skipped))

    @cached_property
    def predictor(self) -> Predictor:
        """The registered model of `best`: ``predict`` and ``predict_proba`` take frames of the training columns."""
        return load_best(self.best.registered, str(self.best.version), self.configs[0].tracking_uri)

    @property
    def study(self) -> optuna.Study:
        """The Optuna study of the best single model."""
        model = next(result.model for result in self.results if result.model in self._studies)
        return self._studies[model]

    @property
    def trials(self) -> pd.DataFrame:
        """The trials of all models: model, number, state, best validation score (larger is better), hyperparameters."""
        rows = [{"model": model, **row} for model, study in self._studies.items() for row in trial_rows(study)]
        return pd.DataFrame(rows)

    @cached_property
    def _studies(self) -> dict[str, optuna.Study]:
        return {config.model: known_study(config) for config in self.configs if stored_identity(config)}

    @property
    def run_url(self) -> str:
        """Where the MLflow UI shows the run of `best`; of a database, as ``mlflow ui`` serves it on this machine."""
        return Reader(self.configs[0].tracking_uri).run_url(self.best.parent_run)

    def __repr__(self) -> str:
        best = self.best
        lines = [render(leaderboard(self.results, self.skipped)), ""]
        lines += [f"skipped: {model.model}: {model.reason}" for model in self.skipped]
        lines.append(f"best: {best.model}, test {score_words(best)}; {best.registered} version {best.version}")
        return "\n".join(lines)


def tune(
    data: pd.DataFrame | str | Path,
    target: str,
    *,
    models: str | Sequence[str] = "bishop",
    time_budget: str | float | None = None,
    trials: int | None = None,
    metric: str | None = None,
    task_type: str = "",
    weights: str = "",
    groups: str = "",
    time: str = "",
    balance: bool = False,
    name: str = "",
    storage: str | Path | None = None,
    tracking_uri: str | None = None,
    verbose: int = 0,
    **options: Any,
) -> SearchResult:
    """Searches models and hyperparameters on a table, evaluates the winners once on the test split, registers them.

    It is ``jobs/tune.py`` as a function. The same call again goes on where it was, or answers at once when it is
    finished. The first Ctrl-C ends the search, and the best trial so far is evaluated; a second one ends the call.

    Args:
        data: A frame, or the path of a .csv, .tsv or .parquet file. A frame is kept as a file in `storage`.
        target: Its target column.
        models: A name of the registry of models, several, or "all".
        time_budget: Of the whole call: seconds, or a text such as "10m". None: the number of trials ends it.
        trials: Trials of all models together. None: 20, 10 per model of several, or no limit within a time budget.
        metric: What selects. None: "auc" for classes, "r2" for numbers.
        task_type: "classification" or "regression", or "" to infer it.
        weights: Column of row weights in training.
        groups: Column of groups that stay together in the split.
        time: Column that orders the split: the latest rows are the test rows.
        balance: Every class weighs the same in training.
        name: Of study, experiment and registered model; "": after the file, or after a frame's rows.
        storage: Folder of studies and checkpoints. None: ``BISHOP_RAY_HOME``, else ``~/bishop_ray``.
        tracking_uri: MLflow address. None: ``MLFLOW_TRACKING_URI``, else a database in the folder of this user.
        verbose: 1 shows a bar of trials on standard error.
        options: Further fields of `SearchOptions`, such as ``seed``, ``max_epochs``, ``refit`` or ``precision``.

    Returns:
        Leaderboard, best model, study and trials.

    Raises:
        UserError: Bad input, a ValueError with the line that the command prints; nothing was searched.
        RuntimeError: No trial gave a score, or no model can do such data.

    Example:
        ::

            result = bishop_ray.tune(frame, "price", models="xgboost", trials=4, name="flats")
            result.leaderboard
            result.predictor.predict(frame.drop(columns="price"))
            bishop_ray.load("flats")  # the same model, in any process
    """
    if unknown := options.keys() - {field.name for field in fields(SearchOptions)}:
        raise UnknownName("option", min(unknown), (field.name for field in fields(SearchOptions)))
    given: dict[str, Any] = options | {"models": models, "time_budget": time_budget, "trials": trials, "metric": metric}
    given |= {"storage": str(storage or ""), "tracking_uri": tracking_uri or ""}
    search_options = SearchOptions(**given)
    deadline = search_options.deadline()
    check_options(search_options)
    if isinstance(data, pd.DataFrame):
        data = write_table(storage_folder(search_options.storage) / "tables", data)
    ref = replace(file_ref(data, target, task_type), roles=Roles(weights, groups, time, balance))
    search = open_search(search_options, [replace(ref, name=name or ref.name)], deadline)
    results, failures, skipped = _run(search, verbose)
    if not results:
        raise RuntimeError("; ".join(failure.reason for failure in failures) or "no model can do such data")
    ranked = sorted(results, key=lambda result: result.val_score, reverse=True)
    return SearchResult(tuple(ranked), tuple(skipped), tuple(search.groups[0]))


def _run(search: Search, verbose: int) -> tuple[list[StudyResult], list[Failure], list[Skipped]]:
    """Runs the search of one dataset; after Ctrl-C, evaluates the best trials so far."""
    (configs,) = search.groups
    ended: dict[str, int] = {}
    total = configs[0].trials if configs[0].trials < NO_LIMIT else None
    with tqdm(total=total, unit="trial", disable=not verbose) as bar:

        def listen(config: StudyConfig, progress: Progress) -> None:
            ended[config.model] = progress.finished
            bar.set_postfix_str(progress.last, refresh=False)
            bar.update(sum(ended.values()) - bar.n)

        try:
            return search.run(listen)
        except KeyboardInterrupt:
            if not any(ended.values()):
                raise
            # The same studies with the trials they have: nothing is searched, the best so far is evaluated.
            have = [replace(config, trials=sum(ended.values()), time_budget=0.0) for config in configs]
            found = replace(search, groups=[have], deadline=0.0).run(listen)
            if not found[0]:
                raise
            return found


@dataclass(frozen=True)
class Search:
    """A search that is ready to run.

    Attributes:
        groups: The studies of each dataset, one per model.
        slots: Trials at a time by kind of slot, for searches over several models.
        deadline: Unix time by which everything must have ended, 0 for none.
        loaded: The rows of the first study, where there is one dataset.
    """

    groups: list[list[StudyConfig]]
    slots: Mapping[str, int]
    deadline: float
    loaded: Loaded | None

    def run(self, listener: Listener) -> tuple[list[StudyResult], list[Failure], list[Skipped]]:
        """Results, failures and skipped models, as `run_studies`."""
        return run_studies(self.groups, self.slots, listener, self.deadline, self.loaded)


def open_search(
    options: SearchOptions,
    refs: Sequence[DatasetRef],
    deadline: float = 0.0,
    connection: Callable[[str], Cluster] = connect,
) -> Search:
    """Checks everything that `check_options` cannot, before the first study, and joins or starts the cluster.

    Args:
        options: What is searched, and where.
        refs: The datasets.
        deadline: Unix time by which everything must have ended, 0 for none.
        connection: Joins the cluster of an address, or starts one.

    Raises:
        UserError: Bad input; nothing was written.
    """
    check_metric_fits(options.metric, refs)
    options = replace(options, tracking_uri=resolved_uri(options.tracking_uri))
    if options.study_db:
        open_database(options.study_db)
    configs = plan_studies(options, refs, None)
    # A single bad table is answered before anything is started.
    loaded = load(configs[0]) if len(refs) == 1 else None
    # What only this process needs is imported and checked while Ray starts, which takes seconds.
    ready = _Background(lambda: _check(options.tracking_uri, configs, loaded))
    cluster = connection(options.ray_address)
    check_shared(storage_folder(options.storage))
    ready.result()
    configs = plan_studies(options, refs, cluster)
    slots = shared_slots(cluster, [config.resources for config in configs], options.max_concurrent)
    groups: dict[str, list[StudyConfig]] = {}
    for config in configs:
        groups.setdefault(config.ref.key, []).append(config)
    return Search(list(groups.values()), slots, deadline, loaded)


def _check(uri: str, configs: Sequence[StudyConfig], loaded: Loaded | None) -> None:
    """Spaces, a single table's columns, the tracking server."""
    for space, model in {(config.space, config.model) for config in configs}:
        if not not_installed(model):
            load_space(space, model)
    if loaded is not None and len(configs) == 1:
        prepare(loaded)
    check_tracking(uri)


class _Background:
    """A call in a thread, whose error appears where its result is asked for."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._error: BaseException | None = None
        self._call = call
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error

    def result(self) -> None:
        """Waits; raises what the call raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
