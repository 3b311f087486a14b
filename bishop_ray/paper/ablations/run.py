"""Ablation runs on Ray."""

from __future__ import annotations

import json
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from bishop_ray.config import Params, StudyConfig
from bishop_ray.data.preprocess import Preprocessor
from bishop_ray.data.table import RawDataset, Table
from bishop_ray.errors import StorageFull, TrainingFailed
from bishop_ray.metrics import display, evaluate
from bishop_ray.paper.ablations.records import COMPLETE, FAILED, AblationRun, Records, exclusive, identity_in, remove
from bishop_ray.paper.ablations.settings import Change, Setting
from bishop_ray.paper.ablations.told import Told, forget
from bishop_ray.paper.ablations.transforms import forest_importance, removed, rotated, rotation, without
from bishop_ray.paths import write_whole
from bishop_ray.search.callback import curves
from bishop_ray.search.cluster import cluster_nodes
from bishop_ray.search.dataset import Loaded, Prepared, load, open_test, prepare, unable
from bishop_ray.search.evaluate import evaluation_seeds
from bishop_ray.search.parameters import FLAGS
from bishop_ray.search.placement import Placement, ResourceRequest, TooLarge
from bishop_ray.training.job import PREDICTOR, ReportCallback, TrialSettings, train_here
from bishop_ray.training.system import as_storage_full, is_full

SCORE = "best_val_score"
STOP = "stop"
"""A file in the ablation's folder: whoever asked for the runs is gone, they end at their next report."""


@dataclass(frozen=True)
class Run:
    """What a task is told.

    Attributes:
        setting: Name of the setting.
        study: Dataset, split and model; its metric is filled in.
        settings: As trials have them; the seed is the run's own, data and folder are not used.
        params: The configuration.
        change: Of the data.
        importance: Of the columns, for changes that go by it.
        openings: How often the test split was opened for this run before.
    """

    setting: str
    study: StudyConfig
    settings: TrialSettings
    params: Params
    change: Change
    importance: dict[str, float]
    openings: int = 0

    @property
    def key(self) -> tuple[str, str, int]:
        """As `AblationRun.key`."""
        return self.setting, self.study.model, self.settings.seed

    def failed(self, reason: str, started: float, openings: int = 0) -> AblationRun:
        """Its record, when it ended without a score."""
        return AblationRun(
            *self.key, FAILED, reason, None, None, time.time() - started, started,
            params=self.settings.all_params(self.params), test_openings=self.openings + openings,
        )  # fmt: skip


def perform(run: Run, loaded: Loaded) -> tuple[AblationRun, str]:
    """The record of a run, and the traceback of an error that is none of training's own, "" otherwise.

    Raises:
        StorageFull: No space is left for what training writes; that is no failure of the run's.
    """
    started, opened = time.time(), [0]
    try:
        return _perform(run, loaded, started, opened), ""
    except TrainingFailed as error:
        return run.failed(str(error), started, opened[0]), ""
    except Exception as error:  # the run has failed with its reason; the others go on
        if is_full(error):
            raise StorageFull(tempfile.gettempdir()) from error
        words = (str(error).strip().splitlines() or ["no message"])[0]
        text = "".join(traceback.format_exception(error))
        return run.failed(f"{type(error).__name__}: {words}"[:500], started, opened[0]), text


def _perform(run: Run, loaded: Loaded, started: float, opened: list[int]) -> AblationRun:
    gone = gone_columns(run.change, loaded.train, run.importance, run.settings.seed)
    parts = replace(
        loaded, config=run.study, train=without(loaded.train, gone), validation=without(loaded.validation, gone)
    )
    prepared = prepare(parts)
    turn = _turn(run, prepared)
    data = replace(prepared.data, train=turn(prepared.data.train), validation=turn(prepared.data.validation))
    epochs: dict[int, dict[str, float]] = {}
    last: list[ReportCallback] = []

    def note(report: ReportCallback) -> bool:
        epochs[report.epoch] = {n: v for n, v in curves(report.metrics()).items() if n.startswith("epoch/")}
        last[:] = [report]
        if (Path(run.settings.folder) / STOP).exists():
            raise TrainingFailed("interrupted")
        return False

    with tempfile.TemporaryDirectory(prefix="bishop-ablation-") as scratch:
        folder = Path(scratch)
        train_here(run.settings.trial(run.params), data, folder / "checkpoint", note, folder / "model")
        from bishop_ray.predictor import Predictor

        model = Predictor.load(folder / "model" / PREDICTOR).model
    # Trained and chosen by validation: from here on nothing is decided any more.
    opened[0] += 1
    test = turn(prepared.preprocessor.transform(without(open_test(run.study), gone)))
    score = evaluate(
        run.study.metric, data.spec.task, test.y, model.predict(test.x_num, test.x_cat), scale=data.target_scale
    )
    (end,) = last
    return AblationRun(
        *run.key,
        COMPLETE,
        end.stop_reason,
        display(run.study.metric, end.metrics()[SCORE]),
        display(run.study.metric, score),
        time.time() - started,
        started,
        epochs,
        run.settings.all_params(run.params),
        run.openings + opened[0],
    )


def gone_columns(change: Change, train: RawDataset, importance: dict[str, float], seed: int) -> list[str]:
    """The columns that a change takes from a dataset whose training rows are `train`."""
    return removed(Preprocessor.fit(train).order, change, importance, seed) if change.order else []


def _turn(run: Run, prepared: Prepared) -> Any:
    """What is done to every encoded table of the run."""
    if not run.change.rotate:
        return _as_it_is
    matrix = rotation(len(prepared.preprocessor.numbers), run.settings.seed)
    return lambda table: rotated(table, matrix)


def _as_it_is(table: Table) -> Table:
    return table


def rank_features(loaded: Loaded) -> dict[str, float]:
    """`forest_importance` of the training rows, as a task."""
    return forest_importance(loaded.train)


WAIT_SECONDS = 1.0
"""How long a wait for a task may last before Ctrl-C is seen."""
IMPORTANCE = "importance.json"


@dataclass(frozen=True)
class AblationConfig:
    """An ablation on one dataset.

    Attributes:
        name: Of the ablation.
        settings: What is to be run, what the others are compared with included.
        base: Model -> its base configuration.
        studies: Model -> dataset, split, metric, epochs, resources; ``eval_seeds`` is the number of runs per setting.
        bases: Model -> the setting that its others are compared with.
    """

    name: str
    settings: tuple[Setting, ...]
    base: Mapping[str, Params]
    studies: Mapping[str, StudyConfig]
    bases: Mapping[str, str]

    @property
    def study(self) -> StudyConfig:
        """What all models share."""
        return next(iter(self.studies.values()))

    @property
    def folder(self) -> Path:
        """Where its records lie."""
        return Path(self.study.storage) / "ablations" / f"{self.study.ref.key}-{self.name}-s{self.study.seed}"


@dataclass(frozen=True)
class AblationResult:
    """What an ablation gave on one dataset.

    Attributes:
        config: The ablation, its metric filled in.
        records: Of all runs asked for that have ended, in the order of the settings, then of the seeds.
        skipped: (setting, model) -> why it is not run.
        trained: Runs that this call trained.
        unsent: Why MLflow does not have all runs, "" when it has.
    """

    config: AblationConfig
    records: tuple[AblationRun, ...]
    skipped: Mapping[tuple[str, str], str]
    trained: int
    unsent: str


def run_ablation(
    config: AblationConfig, listener: Callable[[AblationRun, int, int], None] = lambda record, done, total: None
) -> AblationResult:
    """Trains what is missing and returns all of it.

    Args:
        config: The ablation; the same one again continues.
        listener: Called in this thread for every run that ended, with the number of those and of all that are missing.

    Raises:
        UserError: Bad input, or records of other settings.
        StorageFull: No space is left; what has ended stays.
    """
    loaded = load(config.study)
    metric = loaded.config.metric
    studies = {model: replace(study, metric=metric) for model, study in config.studies.items()}
    config = replace(config, studies=studies)
    prepared = {model: prepare(replace(loaded, config=study)) for model, study in studies.items()}
    every = {model: _settings(study).all_params(config.base[model]) for model, study in studies.items()}
    with exclusive(config.folder), as_storage_full(str(config.folder)):
        if config.study.fresh:
            forget(config.study.tracking_uri, config.name, identity_in(config.folder))
            remove(config.folder)
        records = Records(config.folder, _facts(config, loaded, every))
        told = Told(config.study, config.name, records, prepared[config.study.model], config.bases)
        skipped = _skipped(config, prepared)
        trained = _train_missing(config, loaded, prepared, records, skipped, told, listener)
        told.send(records.runs.values(), last=True)
    keys = [(s.name, s.model, seed) for s in config.settings for seed in evaluation_seeds(config.study)]
    found = tuple(records.runs[key] for key in keys if key in records.runs)
    return AblationResult(config, found, skipped, trained, told.problem)


def _settings(study: StudyConfig, seed: int = 0, folder: str = "") -> TrialSettings:
    return TrialSettings.of(study, folder, metric=study.metric or "accuracy", seed=seed, trainer="inprocess")


def _facts(config: AblationConfig, loaded: Loaded, every: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What decides the results, beside the setting and the seed of a run."""
    roles = config.study.ref.roles
    split = f"{config.study.split}, {roles}" if roles else str(config.study.split)
    facts: dict[str, Any] = {"data": loaded.fingerprint, "split": split}
    facts |= {name: getattr(config.study, name) for name in FLAGS if name not in ("seed", "max_epochs")}
    for model, study in config.studies.items():
        facts |= {f"{model}.{name}": value for name, value in every[model].items() if name not in _OF_RUNS}
        facts[f"{model}.max_epochs"] = study.max_epochs
    return facts


_OF_RUNS = tuple(f"train.{name}" for name in FLAGS)


def _skipped(config: AblationConfig, prepared: Mapping[str, Prepared]) -> dict[tuple[str, str], str]:
    """Settings that cannot be run on the data, or are the base under another name: (setting, model) -> why."""
    found: dict[tuple[str, str], str] = {}
    bases = config.bases
    for setting in config.settings:
        study, of = config.studies[setting.model], prepared[setting.model]
        trials, base = _settings(study), config.base[setting.model]
        same = trials.all_params(setting.params(base)) == trials.all_params(base)
        columns = len(of.preprocessor.order)
        reason = unable(study, of)
        if setting.needs == "categories" and not of.data.spec.n_cat:
            reason = f"no categorical column: the same network as {bases[setting.model]}"
        elif setting.needs == "numbers" and not of.data.spec.n_num:
            reason = f"no numerical column: the same network as {bases[setting.model]}"
        elif setting.change.rotate and len(of.preprocessor.numbers) < 2:
            reason = f"a rotation needs two numerical columns; found {len(of.preprocessor.numbers)}"
        elif setting.change.order and not min(round(columns * setting.change.remove / 100), columns - 1):
            reason = f"{setting.change.remove} % of {columns} features is none: the same as {bases[setting.model]}"
        elif same and not setting.change.order and not setting.change.rotate and setting.name != bases[setting.model]:
            reason = f"the same network as {bases[setting.model]}"
        if reason:
            found[setting.name, setting.model] = reason
    return found


def _train_missing(
    config: AblationConfig,
    loaded: Loaded,
    prepared: Mapping[str, Prepared],
    records: Records,
    skipped: Mapping[tuple[str, str], str],
    told: Told,
    listener: Callable[[AblationRun, int, int], None],
) -> int:
    """Trains, and keeps each run as it ends; the number of them. Seeds come one after the other, settings within."""
    missing = [
        (setting, seed)
        for seed in evaluation_seeds(config.study)
        for setting in config.settings
        if (setting.name, setting.model) not in skipped and not records.complete((setting.name, setting.model, seed))
    ]
    if not missing:
        return 0
    data = ray.put(loaded)
    ranked = any(setting.change.order in ("increasing", "decreasing") for setting, _ in missing)
    importance = _importance(config, data) if ranked else {}
    places = {m: Placement(_settings(s), prepared[m].data, cluster_nodes()) for m, s in config.studies.items()}
    queue: list[tuple[Run, ResourceRequest | TooLarge]] = []
    for setting, seed in missing:
        before = records.runs.get((setting.name, setting.model, seed))
        study, params = config.studies[setting.model], setting.params(config.base[setting.model])
        run = Run(
            setting.name, study, _settings(study, seed, str(config.folder)), params, setting.change, importance,
            before.test_openings if before else 0,
        )  # fmt: skip
        queue.append((run, places[setting.model].of(params)))

    def ended(record: AblationRun, trace: str) -> None:
        records.keep(record)
        if trace:
            name = f"{record.model}-{record.setting}-s{record.seed}.txt"
            write_whole(config.folder / "errors" / name, trace)
        told.send([record])
        ended_runs.append(record)
        listener(record, len(ended_runs), len(missing))

    ended_runs: list[AblationRun] = []
    _work(queue, data, config.study.max_concurrent, config.folder / STOP, ended)
    return len(ended_runs)


def _work(
    queue: list[tuple[Run, ResourceRequest | TooLarge]],
    data: Any,
    slots: int,
    stop: Path,
    ended: Callable[[AblationRun, str], None],
) -> None:
    """Runs the queue in its order, `slots` at a time; a run whose process dies twice has failed."""
    task, running = ray.remote(perform), dict[Any, tuple[Run, float]]()
    stop.unlink(missing_ok=True)
    try:
        while queue or running:
            while queue and len(running) < slots:
                run, ask = queue.pop(0)
                if isinstance(ask, TooLarge):
                    ended(run.failed(ask.reason, time.time()), "")
                    continue
                call = task.options(max_retries=1, **ask.options()).remote(run, data)
                running[call] = (run, time.time())
            done, _ = ray.wait(list(running), timeout=WAIT_SECONDS) if running else ([], [])
            for call in done:
                run, began = running.pop(call)
                try:
                    record, trace = ray.get(call)
                except RayTaskError as error:
                    if isinstance(error.cause, StorageFull):
                        raise StorageFull("what a run keeps while it trains") from None
                    raise
                except RayError as error:
                    record, trace = run.failed(f"its process died: {str(error).splitlines()[0]}"[:500], began), ""
                ended(record, trace)
    finally:
        # `ray.cancel` is not for this: if a call returns at that moment, Ray ends the calling process (2.60).
        if running:
            stop.touch()


def _importance(config: AblationConfig, data: Any) -> dict[str, float]:
    """Of the features by a random forest; kept in a file, for people too."""
    path = config.folder / IMPORTANCE
    if path.is_file():
        kept: dict[str, float] = json.loads(path.read_text("utf-8"))
        return kept
    found: dict[str, float] = ray.get(ray.remote(rank_features).options(num_cpus=1).remote(data))
    write_whole(path, json.dumps(found, indent=1))
    return found
