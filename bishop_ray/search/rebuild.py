"""Ensemble of a finished search built again from its folder, without data or training.

Needs the trained models and their stored predictions of the validation rows; no data, no training, no test rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna

from bishop_ray.errors import UnknownName, UserError
from bishop_ray.metrics import evaluate
from bishop_ray.metrics.bootstrap import Scored
from bishop_ray.models import MODELS, not_installed
from bishop_ray.predictor import EnsemblePredictor
from bishop_ray.registry import Evidence, RegisteredModel, Validation, register_best
from bishop_ray.search.ensemble import (
    AUTOML,
    ENSEMBLE,
    FACTS,
    Candidate,
    Ensemble,
    Problem,
    SearchFacts,
    build_ensemble,
    candidates,
    load_facts,
)
from bishop_ray.search.ensemble_selection import STEPS, TOP_K
from bishop_ray.search.study import locked, read_study, settings_of
from bishop_ray.tracking import study_run


@dataclass(frozen=True)
class Rebuilt:
    """An ensemble built again.

    Attributes:
        search: Name of the search.
        metric: Selection metric of its scores, which are larger-is-better.
        candidates: The trained models that could take part, the best first.
        left_out: What could not take part, with the reason.
        ensemble: Members, weights and the cross-fitted score.
        fitted_score: The ensemble's score on the rows that chose its weights.
        predictor: The ensemble.
        registered: Its version in the registry.
    """

    search: str
    metric: str
    candidates: tuple[Candidate, ...]
    left_out: tuple[str, ...]
    ensemble: Ensemble
    fitted_score: float
    predictor: EnsemblePredictor
    registered: RegisteredModel


class NoEnsemble(Exception):
    """A search whose models make no ensemble of two or more.

    Args:
        reason: One line.
        left_out: What could not take part, with the reason.
    """

    def __init__(self, reason: str, left_out: Sequence[str]) -> None:
        super().__init__(reason)
        self.left_out = tuple(left_out)


def find_search(storage: Path, given: str) -> Path:
    """The folder of a search over several models.

    Args:
        storage: Where studies are kept.
        given: The folder's name, or the key of a dataset that has one such search.

    Raises:
        UserError: No such search; says what there is.
    """
    place = storage / "studies"
    folders = {path.name: path for path in place.iterdir() if path.is_dir()} if place.is_dir() else {}
    datasets = {
        name: name.rpartition(f"-{AUTOML}-s")[0] for name in sorted(folders) if (folders[name] / FACTS).is_file()
    }
    if given in datasets:
        return folders[given]
    same = [name for name, dataset in datasets.items() if dataset == given]
    if len(same) == 1:
        return folders[same[0]]
    if same:
        raise UserError(f"dataset {given!r} has several searches: expected one of {', '.join(same)}")
    if given in folders:
        if f"-{AUTOML}-s" in given:
            raise UserError(f"search {given} has not ended; its own command goes on where it was")
        near = [name for name, dataset in datasets.items() if given.startswith(f"{dataset}-")]
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise UserError(f"study {given} searched one model; expected a search over several (--models all){hint}")
    if not datasets:
        raise UserError(f"--storage: expected at least one ended search over several models (--models all) in {place}")
    raise UnknownName("search", given, datasets)


def rebuild_ensemble(storage: Path, study: str, *, top_k: int = TOP_K, steps: int = STEPS, uri: str = "") -> Rebuilt:
    """Selects, builds and registers the ensemble of a search; the same ensemble gets no second version.

    What cannot be used any more (a model whose library is missing, files that are gone or damaged, a study started over
    on other data) takes no part and is named in the answer.

    Args:
        storage: Where studies are kept.
        study: See `find_search`.
        top_k: Trained models per model family that take part; a search keeps five.
        steps: Members drawn by greedy selection.
        uri: MLflow address, that of the search.

    Raises:
        UserError: No such search, one without usable models or with damaged files, or another process is at it.
        NoEnsemble: A single model alone scores best.
    """
    folder = find_search(storage, study)
    with contextlib.ExitStack() as locks:
        locks.enter_context(locked(folder))
        facts = load_facts(folder)
        for name in facts.studies.values():
            locks.enter_context(locked(folder.with_name(name)))
        run_id = study_run(uri, facts.experiment, folder.name, facts.identity)
        found, left_out = _candidates(facts)
        ensemble, predictor = _build(found, left_out, facts, top_k, steps)
        registered = register_best(
            predictor,
            facts.dataset,
            alias=ENSEMBLE,
            val_score=ensemble.score,
            example=facts.example(),
            run_id=run_id,
            evidence=_evidence(ensemble, facts),
            uri=uri,
            study_id=facts.identity,
            data_key=facts.data_key,
            metric=facts.problem.metric,
            tags={
                "seed": str(facts.problem.seed),
                "data_hash": facts.data_key.split()[0],
                "trained_on": "train",
                "rebuilt": f"top {top_k} of each model, {steps} steps",
            },
        )
        score = _fitted_score(ensemble, facts.problem)
    return Rebuilt(
        folder.name, facts.problem.metric, tuple(found), tuple(left_out), ensemble, score, predictor, registered
    )


def _candidates(facts: SearchFacts) -> tuple[list[Candidate], list[str]]:
    """The usable trained models, the best first; and why others are not."""
    studies, left_out = [], []
    for model, name in facts.studies.items():
        folder = facts.folder.with_name(name)
        try:
            studies.append((model, _study(model, folder, facts), folder))
        except UserError as error:
            left_out.append(f"{model}: {str(error).removeprefix(f'{model} ')}")
    usable: list[Candidate] = []
    for contender in candidates(studies):
        if reason := _unusable(contender, facts.problem, usable[0].predictions().shape[1] if usable else 0):
            left_out.append(f"{contender.model} (trial {contender.number}): {reason}")
        else:
            usable.append(contender)
    return usable, left_out


def _study(model: str, folder: Path, facts: SearchFacts) -> optuna.Study:
    """The study of one model.

    Raises:
        UserError: Its models cannot be used.
    """
    if reason := not_installed(model) if model in MODELS else "no model has this name any more":
        raise UserError(reason)
    study = read_study(folder)
    now = settings_of(study)
    # A study started over under the same name: its predictions are of other rows, its scores of another metric.
    if f"{now.get('data')} {now.get('split')}" != facts.data_key:
        raise UserError("its study was started over on other data or another split")
    if now.get("metric") != facts.problem.metric:
        raise UserError(f"its study was started over with metric {now.get('metric')}")
    if not candidates([(model, study, folder)]):
        raise UserError("no trained model on disk")
    return study


def _unusable(contender: Candidate, problem: Problem, outputs: int) -> str:
    """Why a trained model's predictions of the validation rows cannot be used, or "".

    Args:
        contender: The model.
        problem: What it is scored on.
        outputs: Columns its predictions must have; 0 where that is not known.
    """
    try:
        found = contender.predictions()
    except FileNotFoundError:
        return "its predictions of the validation rows are gone"
    except (OSError, ValueError, EOFError) as error:
        return f"its predictions of the validation rows are damaged ({type(error).__name__})"
    expected = (len(problem.y), outputs or (found.shape[-1] if found.ndim else 0))
    if found.shape != expected or not np.issubdtype(found.dtype, np.floating):
        return f"its predictions are damaged: expected {expected}, found {found.shape} of {found.dtype}"
    return ""


def _build(
    found: list[Candidate], left_out: list[str], facts: SearchFacts, top_k: int, steps: int
) -> tuple[Ensemble, EnsemblePredictor]:
    """The ensemble of those that can be loaded; the others go from `found` to `left_out`.

    Raises:
        UserError: None of the search's models can be used.
        NoEnsemble: A single one alone scores best.
    """
    while True:
        if not found:
            raise UserError(f"search {facts.folder.name} has no usable trained model: {'; '.join(left_out)}")
        ensemble = build_ensemble(found, facts.problem, top_k=top_k, steps=steps)
        members = [contender for contender, _ in ensemble.members] if ensemble else found[:1]
        predictors = []
        for contender in members:
            try:
                predictors.append(contender.load())
            except UserError as error:
                found.remove(contender)
                left_out.append(f"{contender.model} (trial {contender.number}): {error}")
        if len(predictors) == len(members):
            break
    if ensemble is None:
        best, count = found[0], len(found)
        raise NoEnsemble(
            f"{best.model} (trial {best.number}) alone scores best on the validation rows, among {count} trained "
            f"model{'s' if count > 1 else ''}: there is no ensemble to register",
            left_out,
        )
    return ensemble, ensemble.assemble(predictors)


def _evidence(ensemble: Ensemble, facts: SearchFacts) -> Evidence:
    """The raw validation rows are not at hand: the example's rows are what the version is checked by."""
    scored = Scored(facts.problem.y, ensemble.pooled, facts.problem.scale)
    return Evidence(facts.example(), validation=Validation(facts.rows, scored) if facts.rows else None)


def _fitted_score(ensemble: Ensemble, problem: Problem) -> float:
    """The score on the rows that chose the weights."""
    mean = ensemble.predictions(problem)
    return evaluate(problem.metric, problem.task, problem.y, mean, scale=problem.scale)
