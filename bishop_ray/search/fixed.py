"""Fixed training: one model with fixed settings, trained with several seeds on one split; no search.

It is kept as a study is: an Optuna study in a folder named after the settings, with a trial per seed, whose value is
the validation score. So the same command again goes on where it was, or answers what it answered before.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import ray
import yaml
from optuna.trial import TrialState

from bishop_ray._compat.optuna import take_up
from bishop_ray.config import Params, StudyConfig
from bishop_ray.data.refs import DatasetRef
from bishop_ray.errors import TrainingFailed
from bishop_ray.search.cluster import Cluster, cluster_nodes
from bishop_ray.search.dataset import Loaded, Prepared, load, prepare, unable
from bishop_ray.search.evaluate import Evaluation, evaluation_seeds, final_evaluation
from bishop_ray.search.options import SearchOptions
from bishop_ray.search.placement import Placement
from bishop_ray.search.plan import plan_studies
from bishop_ray.search.search import ModelSkipped
from bishop_ray.search.space import SearchSpace, flatten
from bishop_ray.search.study import PARAMS, OpenStudy, exclusive, open_study
from bishop_ray.search.study_runs import open_tracker, recorded, settle_runs, start_over, test_metrics
from bishop_ray.tracking import StudyTracker
from bishop_ray.training.job import STOP_REASON, TrialSettings


@dataclass(frozen=True)
class FixedConfig(StudyConfig):
    """A training with fixed settings; ``eval_seeds`` is the number of seeds, ``trials`` has no meaning.

    Attributes:
        params: The settings that differ from the defaults.
    """

    params: Params = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Deterministic, and another one for other settings."""
        settings = json.dumps([flatten(self.params), self.max_epochs], sort_keys=True)
        digest = hashlib.sha256(settings.encode()).hexdigest()[:8]
        return f"{self.ref.key}-{self.model}-fixed-{digest}-s{self.seed}"


def plan_fixed(
    options: SearchOptions, refs: Sequence[DatasetRef], params: Params, cluster: Cluster | None
) -> list[FixedConfig]:
    """One training per dataset, of the one model of the options; see `plan_studies`."""
    own = {"params": params, "sampler": "none", "scheduler": "none"}
    studies = plan_studies(options, refs, cluster)
    return [FixedConfig(**{f.name: getattr(study, f.name) for f in fields(study)} | own) for study in studies]


@dataclass(frozen=True)
class SeedScore:
    """The training with one seed.

    Attributes:
        seed: Of initialisation, row order and dropout.
        validation: Validation score, larger is better; None if the training failed.
        test: Test score.
        epochs: Epochs, or reports of another library.
        seconds: Of the training.
        note: Why it ended.
    """

    seed: int
    validation: float | None
    test: float | None
    epochs: int
    seconds: float
    note: str


@dataclass(frozen=True)
class FixedResult:
    """What a training with fixed settings ended with.

    Attributes:
        dataset: Key of the dataset.
        model: Registry name.
        metric: Of all scores.
        seeds: One entry per seed.
        linear: Test score of a linear model on the same rows.
        constant: Test score of the constant prediction.
        rows: Rows of train, validation, test.
        params: The settings given, flat.
        seconds: Wall time of all runs of the command.
        folder: Holds the trained predictors, ``final/0000-seed-SEED/predictor``.
        parent_run: MLflow run.
        reused: The command had ended before.
    """

    dataset: str
    model: str
    metric: str
    seeds: tuple[SeedScore, ...]
    linear: float
    constant: float
    rows: tuple[int, ...]
    params: dict[str, Any]
    seconds: float
    folder: str
    parent_run: str
    reused: bool = False

    @property
    def failed(self) -> int:
        """Seeds whose training failed."""
        return sum(score.test is None for score in self.seeds)

    def summary(self, part: str) -> tuple[float, float]:
        """Mean and sample deviation (0 for one seed) over the trained seeds, of "validation" or "test"."""
        values = [value for score in self.seeds if (value := getattr(score, part)) is not None]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


_SEED = "seed"
"""User attribute of a trial: its training seed."""


def run_fixed(config: FixedConfig, loaded: Loaded | None = None) -> FixedResult:
    """Trains with each seed, then opens the test split once for all of them.

    Args:
        config: What to train.
        loaded: What `load` answered for it, if it was called before.

    Raises:
        UserError: Bad input, before anything is written; or other data, split or metric than the last time.
        ModelSkipped: The model cannot do such data; nothing was written either.
        TrainingFailed: No seed's training succeeded.
    """
    loaded = loaded or load(config)
    config, prepared = replace(config, metric=loaded.config.metric), prepare(loaded)
    if reason := unable(config, prepared):
        raise ModelSkipped(reason if reason.startswith(config.model) else f"{config.model}: {reason}")
    space = SearchSpace("fixed", config.model, flatten(config.params), (), yaml.safe_dump(config.params))
    with exclusive(config):
        if config.fresh:
            start_over(config)
        opened = open_study(config, space, prepared.fingerprint)
        stored = opened.result
        if stored and len(stored["seeds"]) == config.eval_seeds:
            settle_runs(config, opened.identity, "FINISHED", "finished")
            seeds = tuple(SeedScore(**entry) for entry in stored["seeds"])
            return FixedResult(**{**stored, "seeds": seeds, "rows": tuple(stored["rows"]), "reused": True})
        return _run(config, space, prepared, opened)


def _run(config: FixedConfig, space: SearchSpace, prepared: Prepared, opened: OpenStudy) -> FixedResult:
    started = time.time()
    tracker = open_tracker(config, space, prepared, opened, {"search_space": "none: fixed settings"})
    settings = TrialSettings.of(config, str(opened.folder), ray.put(prepared.data))
    with recorded(opened, tracker, started):
        numbers = _begin(config, settings, opened, tracker)
        placement = Placement(settings, prepared.data, cluster_nodes())
        try:
            final = final_evaluation(
                config, settings, prepared, 0, config.params, 0.0, opened.count_test_opening, placement
            )
        except TrainingFailed as error:
            reason = str(error).partition("trained again: ")[2] or str(error)
            for number in numbers.values():
                _end(opened, tracker, number, SeedScore(0, None, None, 0, 0.0, reason))
            raise TrainingFailed(f"no seed could be trained: {reason}") from error
        finally:
            shutil.rmtree(opened.folder / "train", ignore_errors=True)  # Ray Train's own state is never read back
        scores = _scores(config, final)
        for score in scores:
            if score.seed in numbers:
                _end(opened, tracker, numbers[score.seed], score)
        return _finish(config, prepared, opened, tracker, final, scores, time.time() - started)


def _begin(config: FixedConfig, settings: TrialSettings, opened: OpenStudy, tracker: StudyTracker) -> dict[int, int]:
    """Seed -> number of its trial, of all seeds that have not ended; those of an interrupted run go on."""
    known = {trial.user_attrs.get(_SEED): trial for trial in opened.study.get_trials(deepcopy=False)}
    numbers = {}
    for seed in evaluation_seeds(config):
        trial = known.get(seed)
        if trial is not None and trial.state == TrialState.COMPLETE:
            continue
        if trial is None or trial.state.is_finished():
            asked = opened.study.ask()
            asked.set_user_attr(_SEED, seed)
            asked.set_user_attr(PARAMS, json.dumps(flatten(config.params)))
            number = asked.number
        else:
            number = trial.number
        tracker.trial_started(number, settings.all_params(config.params) | {"train.seed": seed})
        numbers[seed] = number
    return numbers


def _scores(config: FixedConfig, final: Evaluation) -> tuple[SeedScore, ...]:
    trained = {
        seed: SeedScore(
            seed,
            validation,
            test,
            int(info.get("epochs", 0)),
            round(float(info.get("fit_seconds", 0.0)), 3),
            str(info.get(STOP_REASON, "")),
        )
        for seed, validation, test, info in zip(
            final.seeds, final.val_scores, final.test_scores, final.infos, strict=True
        )
    }
    return tuple(
        trained.get(seed) or SeedScore(seed, None, None, 0, 0.0, f"failed: {final.failed.get(seed, '')}")
        for seed in evaluation_seeds(config)
    )


def _end(opened: OpenStudy, tracker: StudyTracker, number: int, score: SeedScore) -> None:
    """Tells study and MLflow how the training of one seed ended."""
    trial = take_up(opened.study, number)
    trial.set_user_attr("reason", score.note)
    trial.set_user_attr("seconds", score.seconds)
    if score.validation is None or score.test is None:
        opened.study.tell(number, state=TrialState.FAIL)
        tracker.trial_finished(number, "FAILED", score.note)
        return
    opened.study.tell(number, score.validation)
    summary = {"best_val_score": score.validation, "test_score": score.test}
    summary |= {"seconds": score.seconds, "epochs": float(score.epochs)}
    tracker.trial_finished(number, "FINISHED", score.note, summary)


def _finish(
    config: FixedConfig,
    prepared: Prepared,
    opened: OpenStudy,
    tracker: StudyTracker,
    final: Evaluation,
    scores: tuple[SeedScore, ...],
    seconds: float,
) -> FixedResult:
    """Writes the result to MLflow and the study."""
    best = max(final.val_scores)
    tracker.log_final(
        {**test_metrics(final), "best_val_score": best, "trials_complete": float(len(final.seeds))},
        tags={"test_openings": str(opened.test_openings)},
        tables={"leaderboard.json": [asdict(score) for score in scores]},
    )
    result = FixedResult(
        config.ref.key, config.model, config.metric, scores, final.references["linear"], final.references["mean"],
        tuple(prepared.rows), flatten(config.params), round(opened.add_seconds(seconds), 1), str(opened.folder),
        tracker.parent_run_id(),
    )  # fmt: skip
    opened.save_result(asdict(result))
    return result
