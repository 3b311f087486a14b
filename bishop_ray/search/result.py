"""Result of a search over several models: selection, one evaluation on the test split, registration."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from optuna.trial import TrialState

from bishop_ray.config import Skipped, StudyConfig, StudyResult
from bishop_ray.metrics import evaluate
from bishop_ray.paths import write_whole
from bishop_ray.predictor import Predictor
from bishop_ray.registry import Evidence, register_best
from bishop_ray.registry.gate import get_ready
from bishop_ray.search.allocation import REFIT, Budget
from bishop_ray.search.dataset import open_test, test_references
from bishop_ray.search.ensemble import (
    ENSEMBLE,
    IDENTITY,
    Candidate,
    Ensemble,
    Problem,
    build_ensemble,
    candidates,
    save_problem,
)
from bishop_ray.search.evaluate import PREDICTIONS, Costs, measure, predictions_csv, refit_winner
from bishop_ray.search.leaderboard import leaderboard, to_csv
from bishop_ray.search.runner import ModelStudy
from bishop_ray.search.space import flatten
from bishop_ray.search.study import RESULT, OpenStudy, count_states, params_of, seconds_of, trial_rows
from bishop_ray.search.study_runs import evidence, reference_metrics
from bishop_ray.tracking import SPOOL, StudyTracker, settle


def keep_outcome(
    folder: Path,
    whole: StudyConfig,
    opened: Mapping[str, OpenStudy],
    results: Sequence[StudyResult],
    without: Sequence[Skipped],
) -> None:
    """Writes the outcome.

    Args:
        folder: Of the search.
        whole: The search as a study of its own.
        opened: Its studies by model.
        results: As `StudyResult`s, best first.
        without: Models without a trained trial.
    """
    done = _done(opened)
    row = {
        "models": list(opened),
        "refit": whole.refit,
        # Without a time budget a search ends when all trials are there, or when nothing is left to try.
        "trials": done if whole.time_budget else max(done, whole.trials),
        "done": done,
        "results": [asdict(result) for result in results],
        "without": [asdict(skipped) for skipped in without],
    }
    write_whole(folder / RESULT, json.dumps(row))


def kept_outcome(
    folder: Path, whole: StudyConfig, opened: Mapping[str, OpenStudy]
) -> tuple[list[StudyResult], list[Skipped]] | None:
    """The stored outcome, if this very command ended before; arguments as in `keep_outcome`."""
    if not (folder / RESULT).is_file():
        return None
    stored = json.loads((folder / RESULT).read_text("utf-8"))
    if stored["models"] != list(opened) or stored["refit"] != whole.refit:
        return None
    if max(stored["trials"], _done(opened)) < whole.trials or _done(opened) < stored["done"]:
        return None
    # A process that was killed at the very end left its runs open.
    end_runs(whole, folder, (folder / IDENTITY).read_text("utf-8"), "FINISHED", "finished")
    for study in opened.values():
        end_runs(whole, study.folder, study.identity, "FINISHED", "finished")
    return [StudyResult(**row | {"reused": True}) for row in stored["results"]], [
        Skipped(**row) for row in stored["without"]
    ]


def end_runs(whole: StudyConfig, folder: Path, identity: str, status: str, reason: str) -> None:
    """Ends what the study in `folder` left open in MLflow."""
    settle(whole.tracking_uri, whole.ref.experiment, identity, folder / SPOOL, status, reason)


def _done(opened: Mapping[str, OpenStudy]) -> int:
    return sum(count_states(o.study).total() for o in opened.values())


def log_verdict(
    families: Sequence[ModelStudy],
    results: Sequence[StudyResult],
    tracker: StudyTracker,
    ensemble: Ensemble | None,
    skipped: Sequence[Skipped],
    predictions: Mapping[str, str],
) -> None:
    """Writes the leaderboard beside the search's run, and each model's own result beside its study's.

    Args:
        families: The searched studies.
        results: Per model and of the ensemble, best validation score first.
        tracker: The search's own run.
        ensemble: The ensemble, if there is one.
        skipped: Models without a result.
        predictions: Model -> `predictions_csv`.
    """
    best = results[0]
    rows = leaderboard(results, skipped)
    texts = {"leaderboard.csv": to_csv(rows)}
    if ensemble is not None:
        texts["ensemble.txt"] = f"cross-fitted {best.metric}: {ensemble.score!r}\n{ensemble.words()}\n"
    tracker.log_final(
        {"best_val_score": best.val_score, "test_score": best.test_mean, "test_score_linear": best.linear,
         "test_score_constant": best.mean, "models": float(len(families))},
        tags={"champion": best.model, "registered_model": f"{best.registered} v{best.version}",
              "trained_on": best.trained_on},
        texts=texts,
        tables={"leaderboard.json": rows},
    )  # fmt: skip
    by_model = {result.model: result for result in results}
    for family in families:
        result = by_model.get(family.config.model)
        if result is None:
            continue
        numbers = {"best_val_score": result.val_score, "test_score": result.test_mean}
        numbers |= reference_metrics({"linear": result.linear, "mean": result.mean})
        numbers |= {"fit_seconds": result.fit_seconds, "predict_ms_per_1000_rows": result.predict_ms}
        numbers |= {f"trials_{state}": float(count) for state, count in result.trials.items()}
        family.tracker.log_final(
            numbers,
            tags={"best_trial": str(result.best_trial), "registered_model": f"{result.registered} v{result.version}",
                  "test_openings": str(family.opened.test_openings), "trained_on": result.trained_on},
            texts={PREDICTIONS: predictions[result.model]},
            tables={"leaderboard.json": trial_rows(family.opened.study)},
        )  # fmt: skip


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SelectedModels:
    """What a search over several models ended with.

    Attributes:
        results: A result per model that has a trained trial, and the ensemble's; best validation score first.
        without: Models that have none, with the reason.
    """

    results: list[StudyResult]
    without: list[Skipped]


@dataclass(frozen=True)
class _Entry:
    """A row of the leaderboard before it is registered."""

    model: str
    predictor: Predictor
    val_score: float
    trial: int
    family: ModelStudy | None
    params: dict[str, Any]
    trained_on: str = "train"
    contender: Candidate | None = None
    ensemble: Ensemble | None = None

    def evidence(self, first: ModelStudy, problem: Problem) -> Evidence:
        """What it is registered with; a refit never saw the validation rows as such."""
        output: NDArray[Any]
        trained: NDArray[Any]
        if self.ensemble is not None:
            output, trained = self.ensemble.pooled, self.ensemble.predictions(problem)
        else:
            assert self.contender is not None
            output = trained = self.contender.predictions()
        on_gpu = first.config.resources.gpus > 0 or bool(self.family and self.family.config.resources.gpus > 0)
        return evidence(first.prepared, output, trained if self.trained_on == "train" else None, on_gpu)


def judge(
    whole: StudyConfig,
    families: Sequence[ModelStudy],
    folder: Path,
    identity: str,
    tracker: StudyTracker,
    skipped: Sequence[Skipped],
    budget: Budget,
) -> SelectedModels:
    """Compares by validation scores, then opens the test split once, then registers.

    The champion is the best single model, or the ensemble where its cross-fitted score is better.

    Args:
        whole: The search as a study of its own.
        families: The searched studies.
        folder: The search's folder.
        identity: The search's identity.
        tracker: The search's own run.
        skipped: Models that were not tried, for the leaderboard.
        budget: A refit that it has no time for is left out.
    """
    get_ready()  # it takes seconds, beside the refit and the predictions of test rows
    studies = [(f.config.model, f.opened.study, f.opened.folder) for f in families]
    found = candidates(studies)
    data = families[0].prepared.data
    problem = Problem(data.validation.y, whole.metric, data.spec.task, data.target_scale, whole.seed)
    save_problem(folder, problem, whole, [f.config for f in families], families[0].prepared)
    ensemble = build_ensemble(found, problem)
    entries = _entries(whole, families, found, ensemble, budget)
    without = [
        Skipped(whole.ref.key, f.config.model, why_not(f, whole))
        for f in families
        if f.config.model not in {c.model for c in found}
    ]
    for family in families:
        family.opened.count_test_opening()
    test = open_test(whole)
    references = test_references(whole, test)
    results, predictions = [], {}
    for entry in entries:
        output, costs = measure(entry.predictor, test.frame)
        target = entry.predictor.target
        y = target.encode(test.target)
        score = evaluate(whole.metric, problem.task, y, output, scale=target.units)
        if entry.contender is not None:
            validation = (problem.y, entry.contender.predictions())
            predictions[entry.model] = predictions_csv(target, validation, (y, output))
        known = entry.evidence(families[0], problem)
        results.append(_register(whole, entry, known, costs, score, references, families[0], identity, tracker))
    log_verdict(families, results, tracker, ensemble, [*skipped, *without], predictions)
    return SelectedModels(results, without)


def why_not(family: ModelStudy, whole: StudyConfig) -> str:
    """Why a model has no trained trial."""
    trials = [t for t in family.opened.study.get_trials(deepcopy=False) if t.state != TrialState.WAITING]
    if reasons := sorted({str(t.user_attrs["reason"]) for t in trials if t.user_attrs.get("reason")}):
        return f"no trained trial: {'; '.join(reasons[:2])}"
    if trials:
        return "no trial reached a first score within the time budget"
    return "no time was left for a trial" if whole.time_budget else f"the {whole.trials} trials went to other models"


def _entries(
    whole: StudyConfig,
    families: Sequence[ModelStudy],
    found: Sequence[Candidate],
    ensemble: Ensemble | None,
    budget: Budget,
) -> list[_Entry]:
    """The best of each model and the ensemble, best validation score first; the first one refitted, if asked."""
    by_model = {f.config.model: f for f in families}
    entries: list[_Entry] = []
    for contender in found:
        if contender.model not in {entry.model for entry in entries}:
            family = by_model[contender.model]
            params = flatten(params_of(family.opened.study, contender.number))
            row = (contender.model, contender.load(), contender.score, contender.number, family, params)
            entries.append(_Entry(*row, contender=contender))
    if ensemble is not None:
        predictor = ensemble.load()
        mixed = _Entry(ENSEMBLE, predictor, ensemble.score, -1, None, dict(predictor.hparams), ensemble=ensemble)
        # After a single model of the same score: among equals the simpler one.
        entries.insert(sum(entry.val_score >= ensemble.score for entry in entries), mixed)
    if whole.refit and entries:
        seconds = REFIT * float(entries[0].predictor.info.get("fit_seconds", 0.0))
        if budget.allows(seconds):
            entries[0] = _refitted(entries[0], by_model, ensemble)
        else:
            logger.warning("no refit: it takes about %.0f s, and the time budget is nearly over", seconds)
    return entries


def _refitted(entry: _Entry, by_model: dict[str, ModelStudy], ensemble: Ensemble | None) -> _Entry:
    """The champion trained on train and validation rows: every member of it, if it is the ensemble."""
    if entry.model == ENSEMBLE and ensemble is not None:
        predictor: Predictor = ensemble.assemble(
            [_refit(by_model[c.model], c.number, c.load()) for c, _ in ensemble.members]
        )
    else:
        predictor = _refit(by_model[entry.model], entry.trial, entry.predictor)
    return replace(entry, predictor=predictor, trained_on="train and validation")


def _refit(family: ModelStudy, number: int, found: Predictor) -> Predictor:
    config, params = family.config, params_of(family.opened.study, number)
    return refit_winner(config, family.settings, params, config.seed, found, number, family.placement.again(params))


def _register(
    whole: StudyConfig,
    entry: _Entry,
    known: Evidence,
    costs: Costs,
    score: float,
    references: dict[str, float],
    first: ModelStudy,
    identity: str,
    tracker: StudyTracker,
) -> StudyResult:
    """A version of the registered model, with its alias; the first entry becomes champion."""
    family, prepared = entry.family, first.prepared
    own = family.tracker if family else tracker
    run_id = own.parent_run_id()
    scores = {"test_score": score} | reference_metrics(references)
    model = register_best(
        entry.predictor,
        whole.ref.key,
        alias=entry.model,
        val_score=entry.val_score,
        example=prepared.example.frame,
        run_id=run_id,
        evidence=known,
        uri=whole.tracking_uri,
        study_id=family.opened.identity if family else identity,
        search=identity,
        data_key=f"{prepared.fingerprint} {whole.split}",
        metric=whole.metric,
        metrics=scores,
        tags={"seed": str(whole.seed), "data_hash": prepared.fingerprint, "trained_on": entry.trained_on},
    )
    study = family.opened.study if family else None
    return StudyResult(
        dataset=whole.ref.key,
        model=entry.model,
        metric=whole.metric,
        trials=dict(count_states(study)) if study else {},
        best_trial=entry.trial,
        val_score=entry.val_score,
        test_mean=score,
        test_std=0.0,
        test_scores=[score],
        linear=references["linear"],
        mean=references["mean"],
        registered=model.name,
        version=str(model.version),
        seconds=seconds_of(study) if study else 0.0,
        rows=list(prepared.rows),
        params=entry.params,
        parent_run=run_id,
        champion=model.champion,
        verdict=model.verdict,
        trained_on=entry.trained_on,
        size_bytes=model.size_bytes,
        **asdict(costs),
    )
