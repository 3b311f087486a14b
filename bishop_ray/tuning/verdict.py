"""The end of a search over several models, written to MLflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bishop_ray.config import Skipped, StudyResult
from bishop_ray.reports import leaderboard, to_csv
from bishop_ray.tracking import StudyTracker
from bishop_ray.tuning.chronicle import reference_metrics
from bishop_ray.tuning.contenders import Ensemble
from bishop_ray.tuning.predictions import PREDICTIONS
from bishop_ray.tuning.search import Family
from bishop_ray.tuning.trials import trial_rows


def log_verdict(
    families: Sequence[Family],
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
