"""Study lifecycle: search, final evaluation, registration, for one model or several."""

from __future__ import annotations

import contextlib
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from bishop_ray.config import Skipped, StudyConfig, StudyResult
from bishop_ray.errors import StorageFull, TrainingFailed, UserError
from bishop_ray.models import model_class, not_installed
from bishop_ray.paths import write_whole
from bishop_ray.search.allocation import REFIT, Budget, SuccessiveHalving
from bishop_ray.search.callback import Progress
from bishop_ray.search.cluster import slot_kind
from bishop_ray.search.dataset import Loaded, Prepared, check_table, load, prepare, unable
from bishop_ray.search.ensemble import AUTOML, IDENTITY
from bishop_ray.search.evaluate import evaluation_seconds, final_evaluation
from bishop_ray.search.result import end_runs, judge, keep_outcome, kept_outcome, why_not
from bishop_ray.search.runner import ModelStudy, make_model_study, run_search
from bishop_ray.search.space import SearchSpace, load_space
from bishop_ray.search.study import OpenStudy, best_of, exclusive, kept_models, params_of
from bishop_ray.search.study_runs import (
    finish,
    finished_result,
    open_search_tracker,
    open_tracker,
    recorded,
    start_over,
)
from bishop_ray.search.warm_start import open_warm
from bishop_ray.training.system import as_storage_full

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
        return _run(config, space, prepared, opened, check_table(config, [opened], loaded), listener, deadline)


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
        family = make_model_study(config, space, prepared, opened, tracker, ray.put(prepared.data), listener)
        settings, progress = family.settings, family.progress
        run_search(
            [family],
            {"": SuccessiveHalving([config.model])},
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


def _is_over(family: ModelStudy, deadline: float) -> bool:
    """Whether trials must end now: what the final evaluation of the best trial so far will need is kept."""
    config, recorder, study = family.config, family.recorder, family.opened.study
    best = best_of(study)
    if best is not None:
        longest = float(study.get_trials(deepcopy=False)[best[0]].user_attrs.get("seconds", 0.0))
    else:
        longest = recorder.longest_running()
    ends = deadline - FINISH_SECONDS - evaluation_seconds(config, recorder.through_ray_train, longest * 1.2)
    return time.time() > ends


def _why_none(opened: OpenStudy) -> str:
    reasons = [t.user_attrs.get("reason", "") for t in opened.study.get_trials(deepcopy=False)]
    shown = sorted({reason for reason in reasons if reason})
    return "no trial gave a score: " + ("; ".join(shown[:3]) or "no time was left for the first epoch")


STARTUP = 4
"""Trials of a model before its sampler models anything: most models get few."""
Listener = Callable[[StudyConfig, Progress], None]


def automl_config(config: StudyConfig) -> StudyConfig:
    """The search over all models as a study of its own, for its name and folder."""
    return replace(config, model=AUTOML)


def automl_folder(config: StudyConfig) -> Path:
    """Where a search over several models keeps what belongs to none of them."""
    return Path(config.storage) / "studies" / automl_config(config).name


def run_automl(
    configs: Sequence[StudyConfig],
    slots: Mapping[str, int],
    listener: Listener,
    deadline: float = 0.0,
    loaded: Loaded | None = None,
) -> tuple[list[StudyResult], list[Skipped]]:
    """Searches all models, builds the ensemble, evaluates once, registers.

    Args:
        configs: A study per model, of one dataset; ``trials`` and ``time_budget`` are those of all together.
        slots: Trials at a time on CPUs ("cpu") and on GPUs ("gpu").
        listener: Called in this thread whenever something happened.
        deadline: Unix time by which all of it must have ended, 0 for none.
        loaded: What `load` answered for the first study, if it was called before.

    Returns:
        A result per model that has one, the ensemble among them, best validation score first; and who was skipped.

    Raises:
        UserError: Bad input, before anything is written; or none of the models can be trained on these data.
        StudyFailed: No trial of any model gave a score.
    """
    loaded = loaded or load(configs[0])
    configs = [replace(config, metric=loaded.config.metric) for config in configs]
    data = _Encodings(loaded)
    able, skipped = _able(configs, data)
    if not able:
        raise UserError("no model can be trained: " + "; ".join(f"{s.model}: {s.reason}" for s in skipped))
    spaces = {config.model: load_space(config.space, config.model) for config in able}
    folder, whole = automl_folder(able[0]), automl_config(able[0])
    with contextlib.ExitStack() as locks:
        for config in (whole, *able):
            locks.enter_context(exclusive(config))
        if whole.fresh:
            if (folder / IDENTITY).is_file():
                end_runs(whole, folder, _identity(folder), "KILLED", "started over")
            shutil.rmtree(folder, ignore_errors=True)
            for config in able:
                start_over(config)
        opened = {config.model: open_warm(config, spaces[config.model], loaded) for config in able}
        if (kept := kept_outcome(folder, whole, opened)) is not None:
            return kept[0], skipped + kept[1]
        run = _Run(whole, able, slots, listener, deadline, folder)
        results, without = run.run(data, spaces, opened, skipped)
        return results, skipped + without


class _Encodings:
    """The dataset as each kind of model reads it, encoded once per kind."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self._known: dict[str, Prepared] = {}
        self._shared: dict[str, Any] = {}

    def of(self, config: StudyConfig) -> Prepared:
        """For the model of `config`."""
        kind = model_class(config.model).numeric
        if kind not in self._known:
            self._known[kind] = prepare(replace(self.loaded, config=config))
        return self._known[kind]

    def shared(self, config: StudyConfig) -> Any:
        """The same in Ray's object store."""
        kind = model_class(config.model).numeric
        if kind not in self._shared:
            self._shared[kind] = ray.put(self.of(config).data)
        return self._shared[kind]


def _able(configs: Sequence[StudyConfig], data: _Encodings) -> tuple[list[StudyConfig], list[Skipped]]:
    """The studies whose model can be trained on the data, and the others with their reasons."""
    able: list[StudyConfig] = []
    skipped: list[Skipped] = []
    for config in configs:
        reason = not_installed(config.model)
        if not reason:
            reason = unable(config, data.of(config))
        if reason:
            skipped.append(Skipped(config.ref.key, config.model, reason))
        else:
            able.append(config)
    return able, skipped


class _Run:
    """One run of a search over several models."""

    def __init__(
        self,
        whole: StudyConfig,
        configs: Sequence[StudyConfig],
        slots: Mapping[str, int],
        listener: Listener,
        deadline: float,
        folder: Path,
    ) -> None:
        self.whole, self.configs, self.slots, self.listener, self.folder = whole, configs, slots, listener, folder
        self._families: Sequence[ModelStudy] = []
        self.budget = Budget(deadline, len(configs), self._refit_seconds)
        self.progress = Progress(0 if deadline else whole.trials, whole.metric)

    def run(
        self,
        data: _Encodings,
        spaces: Mapping[str, SearchSpace],
        opened: Mapping[str, OpenStudy],
        skipped: Sequence[Skipped],
    ) -> tuple[list[StudyResult], list[Skipped]]:
        """Search, verdict, records."""
        self.folder.mkdir(parents=True, exist_ok=True)
        identity = _identity(self.folder)
        models = [config.model for config in self.configs]
        tracker = open_search_tracker(self.whole, models, self.slots, data.of(self.configs[0]), self.folder, identity)
        tracker.tag_study(check_table(self.whole, opened.values(), data.loaded))
        families: list[ModelStudy] = []
        status = "FAILED"
        try:
            with as_storage_full(str(self.folder)):
                parent = {"mlflow.parentRunId": tracker.parent_run_id(), "automl": self.whole.name}
                for config in self.configs:
                    families.append(self._family(config, spaces[config.model], data, opened[config.model], parent))
                self._search(families)
                self._tell("evaluating the best of each model on the test split, once")
                verdict = judge(self.whole, families, self.folder, identity, tracker, skipped, self.budget)
                keep_outcome(self.folder, self.whole, opened, verdict.results, verdict.without)
                status = "FINISHED"
                return verdict.results, verdict.without
        except (KeyboardInterrupt, StorageFull):
            status = "KILLED"
            raise
        finally:
            for family in families:
                with contextlib.suppress(StorageFull):
                    family.opened.add_seconds(time.time() - self.budget.began)
                family.tracker.close(status)
            tracker.close(status)

    def _limit(self, race: SuccessiveHalving, waiting: int, slots: int) -> float:
        share, own = self.budget.limit(race, waiting, slots), self.whole.trial_limit
        return min(share, own) if share and own else share or own

    def _family(
        self, config: StudyConfig, space: SearchSpace, data: _Encodings, opened: OpenStudy, tags: dict[str, str]
    ) -> ModelStudy:
        prepared = data.of(config)
        tracker = open_tracker(config, space, prepared, opened, tags)
        shared = data.shared(config)
        return make_model_study(
            config, space, prepared, opened, tracker, shared, partial(self.listener, config), STARTUP
        )

    def _search(self, families: Sequence[ModelStudy]) -> None:
        kinds: dict[str, list[str]] = {}
        for family in families:
            family.progress.total = 0
            kinds.setdefault(slot_kind(family.config.resources), []).append(family.config.model)
        races = {
            kind: SuccessiveHalving(names, self.folder / f"race-{kind}.json", self._on_round)
            for kind, names in kinds.items()
        }
        self._families = families
        over = self.budget.over if self.budget.deadline else None
        run_search(families, races, self.slots, self.whole.trials, self.folder, self._limit, over)
        if not any(kept_models(family.opened.study, family.opened.folder) for family in families):
            reasons = "; ".join(f"{f.config.model}: {why_not(f, self.whole)}" for f in families[:3])
            raise StudyFailed(f"no model was trained to its end: {reasons}")

    def _refit_seconds(self) -> float:
        """What a refit of the best trial so far would take."""
        if not self.whole.refit:
            return 0.0
        found = [(best[1], f.opened.study, best[0]) for f in self._families if (best := best_of(f.opened.study))]
        if not found:
            return 0.0
        _, study, number = max(found, key=lambda row: row[0])
        return REFIT * float(study.get_trials(deepcopy=False)[number].user_attrs.get("seconds", 0.0))

    def _on_round(self, number: int, names: Sequence[str]) -> None:
        self._tell(f"round {number} of the race: {', '.join(names)}")

    def _tell(self, event: str) -> None:
        self.progress.last = event
        self.listener(self.whole, self.progress)


def _identity(folder: Path) -> str:
    """The identity of the search, the same in every run of it."""
    path = folder / IDENTITY
    if not path.is_file():
        write_whole(path, uuid.uuid4().hex[:12])
    return path.read_text("utf-8")
