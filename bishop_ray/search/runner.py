"""Ray Tuner over the studies of one or several models."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import tune
from ray.tune import Tuner

from bishop_ray._compat.ray import keep_out_of_logs
from bishop_ray.config import Params, StudyConfig
from bishop_ray.search.allocation import SuccessiveHalving
from bishop_ray.search.callback import Progress, StudyCallback, StudyCallbacks
from bishop_ray.search.cluster import cluster_nodes
from bishop_ray.search.dataset import Prepared
from bishop_ray.search.placement import Node, Placement
from bishop_ray.search.samplers import sampler_factory
from bishop_ray.search.scheduler import PerModel, make_scheduler
from bishop_ray.search.searcher import ModelSearcher, TrialSource
from bishop_ray.search.space import SearchSpace
from bishop_ray.search.stopper import SearchStopper
from bishop_ray.search.study import OpenStudy, best_of, count_states
from bishop_ray.signals import DeferredSignals
from bishop_ray.tracking import StudyTracker
from bishop_ray.training.job import TrialSettings
from bishop_ray.training.trainable import train_driver


@dataclass(frozen=True)
class ModelStudy:
    """A model's study, ready to be searched.

    Attributes:
        config: The study.
        prepared: Its data.
        opened: The study on disk.
        settings: What its trials share.
        tracker: Its side of MLflow.
        progress: Where it stands, kept up to date by the search.
        asker: Hands out its points.
        scheduler: Stops its trials early.
        recorder: Hears what happens to its trials.
        placement: Says what a trial asks for.
    """

    config: StudyConfig
    prepared: Prepared
    opened: OpenStudy
    settings: TrialSettings
    tracker: StudyTracker
    progress: Progress
    asker: TrialSource
    scheduler: Any
    recorder: StudyCallback
    placement: Placement


def make_model_study(
    config: StudyConfig,
    space: SearchSpace,
    prepared: Prepared,
    opened: OpenStudy,
    tracker: StudyTracker,
    data: Any,
    listener: Callable[[Progress], None],
    startup: int = 0,
    nodes: Sequence[Node] | None = None,
) -> ModelStudy:
    """Joins what a study needs to be searched.

    Args:
        config: The study.
        space: Its search space.
        prepared: Its data.
        opened: The study on disk.
        tracker: Its side of MLflow.
        data: Object reference of `prepared.data`.
        listener: Called with the study's progress whenever something happened.
        startup: Trials before the sampler models anything; 0 for what suits ``config.trials``.
        nodes: Where trials may run; None for the nodes of the cluster, empty for no prediction of what they need.
    """
    settings = TrialSettings.of(config, str(opened.folder), data)
    best = best_of(opened.study)
    progress = Progress(config.trials, config.metric, count_states(opened.study), best[1] if best else None)
    asker = TrialSource(opened.study, space, sampler_factory(config, startup))
    scheduler = make_scheduler(config, opened.study)
    recorder = StudyCallback(
        opened.study, asker.asked, scheduler, tracker, progress, listener, settings, asker.interrupted.append
    )
    placement = Placement(settings, prepared.data, cluster_nodes() if nodes is None else nodes)
    return ModelStudy(config, prepared, opened, settings, tracker, progress, asker, scheduler, recorder, placement)


def run_search(
    families: Sequence[ModelStudy],
    races: Mapping[str, SuccessiveHalving],
    slots: Mapping[str, int],
    total: int,
    folder: Path,
    limit: Callable[[SuccessiveHalving, int, int], float],
    over: Callable[[], bool] | None,
) -> None:
    """Runs trials until `total` exist or the search is over.

    A trial whose process or node dies goes on in another one (`StudyCallback.on_trial_error`).

    Args:
        families: The models' studies.
        races: By kind of slot, see `ModelSearcher`.
        slots: Trials at a time by kind of slot.
        total: Trials of all studies together, those of earlier runs counted.
        folder: For what Tune writes; removed afterwards.
        limit: See `ModelSearcher`.
        over: Asked all the time; True stops whatever runs.

    Raises:
        StorageFull: No space is left; trials that ran stay open, as when the process is interrupted.
    """
    ended = sum(family.progress.counts.total() for family in families)
    if ended >= total:
        return
    askers = {family.config.model: family.asker for family in families}
    settings = {family.config.model: family.settings for family in families}
    places = {family.config.model: family.placement.of for family in families}
    trainable = tune.with_parameters(train_driver, settings=settings)
    scheduler = PerModel({family.config.model: family.scheduler for family in families})
    recorders = {family.config.model: family.recorder for family in families}

    callback = StudyCallbacks(recorders)
    kills = any(family.config.trial_limit for family in families)

    def refuse(model: str, number: int, params: Params, reason: str) -> None:
        recorders[model].refuse(number, params, reason)

    keep_out_of_logs()
    attempt = f"tune-{uuid.uuid4().hex[:8]}"
    try:
        # Tune takes what its callbacks raise for a trial's failure: Ctrl-C waits for `Watch`, the second one does not.
        with DeferredSignals(patience=1) as held:
            Tuner(
                tune.with_resources(trainable, _bundle),
                tune_config=tune.TuneConfig(
                    search_alg=ModelSearcher(
                        askers, races, slots, total, limit, places, families[0].placement.nodes, refuse, kills
                    ),
                    scheduler=scheduler,
                    num_samples=-1,  # the searcher knows when to end; a trial may need several of Tune's
                    reuse_actors=True,
                ),
                run_config=tune.RunConfig(
                    name=attempt,
                    storage_path=str(folder),
                    callbacks=[callback],
                    verbose=0,
                    stop=SearchStopper(scheduler, recorders, callback, over, held),
                ),
            ).fit()
        for family in families:
            family.recorder.end_running()
    except BaseException:
        scheduler.abandon()
        for family in families:
            family.recorder.release()
        raise
    finally:
        # Tune's and Train's own state is never read back: the studies are the record.
        shutil.rmtree(folder / attempt, ignore_errors=True)
        for family in families:
            shutil.rmtree(family.opened.folder / "train", ignore_errors=True)


def _bundle(config: dict[str, Any]) -> tune.PlacementGroupFactory:
    """What a trial holds; equal ones share processes."""
    return tune.PlacementGroupFactory([config["bundle"]])
