"""One study: search, final evaluation, registration. Run again, it goes on where it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import ray

from bishop_ray.config import StudyConfig, StudyResult
from bishop_ray.errors import TrainingFailed, UserError
from bishop_ray.tuning.chronicle import finish, finished_result, open_tracker, recorded, start_over
from bishop_ray.tuning.evaluate import evaluation_seconds, final_evaluation
from bishop_ray.tuning.look import first_look
from bishop_ray.tuning.prepare import Loaded, Prepared, load, prepare, unable
from bishop_ray.tuning.progress import Progress
from bishop_ray.tuning.race import Race
from bishop_ray.tuning.search import Family, make_family, run_search
from bishop_ray.tuning.space import SearchSpace, load_space
from bishop_ray.tuning.store import OpenStudy, exclusive
from bishop_ray.tuning.trials import best_of, params_of
from bishop_ray.tuning.warm import open_warm

FINISH_SECONDS = 8.0
"""Kept of a time budget for loading, scoring and registering the winner."""


class ModelSkipped(UserError):
    """The study's model cannot do the data; the message says why."""


class StudyFailed(Exception):
    """A study without a single usable trial; the message says why."""


def run_study(
    config: StudyConfig,
    listener: Callable[[Progress], None] = lambda progress: None,
    deadline: float = 0.0,
    loaded: Loaded | None = None,
) -> StudyResult:
    """Searches, evaluates once, registers.

    Args:
        config: The study; the same one again continues, or returns the stored result when it is finished.
        listener: Called in this thread whenever something happened.
        deadline: Unix time by which all of it must have ended, 0 for none.
        loaded: What `load` answered for this study, if it was called before.

    Raises:
        UserError: Bad input, before anything is written.
        ModelSkipped: The model cannot do such data; nothing was written either.
        StudyFailed: No trial gave a score.
    """
    space = load_space(config.space, config.model)
    loaded = loaded or load(config)
    config, prepared = replace(config, metric=loaded.config.metric), prepare(loaded)
    if reason := unable(config, prepared):
        raise ModelSkipped(reason if reason.startswith(config.model) else f"{config.model}: {reason}")
    with exclusive(config):
        if config.fresh:
            start_over(config)
        opened = open_warm(config, space, loaded)
        if (stored := finished_result(config, opened)) is not None:
            return stored
        return _run(config, space, prepared, opened, first_look(config, [opened], loaded), listener, deadline)


def _run(
    config: StudyConfig,
    space: SearchSpace,
    prepared: Prepared,
    opened: OpenStudy,
    look: Mapping[str, str],
    listener: Callable[[Progress], None],
    deadline: float,
) -> StudyResult:
    started = time.time()
    tracker = open_tracker(config, space, prepared, opened)
    tracker.tag_study(look)
    with recorded(opened, tracker, started):
        family = make_family(config, space, prepared, opened, tracker, ray.put(prepared.data), listener)
        settings, progress = family.settings, family.progress
        run_search(
            [family],
            {"": Race([config.model])},
            {"": config.max_concurrent},
            config.trials,
            opened.folder,
            lambda race, waiting, slots: config.trial_limit,
            (lambda: _is_over(family, deadline)) if deadline else None,
        )
        best = best_of(opened.study)
        if best is None:
            raise StudyFailed(_why_none(opened))
        progress.last = f"final evaluation of trial {best[0]} with {config.eval_seeds} seed(s)"
        listener(progress)
        params = params_of(opened.study, best[0])
        try:
            final = final_evaluation(
                config, settings, prepared, best[0], params, deadline, opened.count_test_opening, family.placement
            )
        except TrainingFailed as error:
            raise StudyFailed(str(error)) from error
        return finish(config, prepared, opened, tracker, best, final, opened.add_seconds(time.time() - started))


def _is_over(family: Family, deadline: float) -> bool:
    """Whether trials must end now: what the final evaluation of the best trial so far will need is kept."""
    config, recorder, study = family.config, family.recorder, family.opened.study
    best = best_of(study)
    if best is not None:
        longest = float(study.get_trials(deepcopy=False)[best[0]].user_attrs.get("seconds", 0.0))
    else:
        longest = recorder.longest_running()
    ends = deadline - FINISH_SECONDS - evaluation_seconds(config, recorder.through_ray_train, longest * 1.2)
    if time.time() > ends:
        recorder.stopping = "time budget"
        return True
    return False


def _why_none(opened: OpenStudy) -> str:
    reasons = [t.user_attrs.get("reason", "") for t in opened.study.get_trials(deepcopy=False)]
    shown = sorted({reason for reason in reasons if reason})
    return "no trial gave a score: " + ("; ".join(shown[:3]) or "no time was left for the first epoch")
