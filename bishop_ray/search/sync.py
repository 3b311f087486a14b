"""MLflow brought to where the studies on disk are, after it was away or a search was killed and not run again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState

from bishop_ray.errors import SourceUnavailable, UnknownName, UserError
from bishop_ray.search.callback import curves
from bishop_ray.search.ensemble import IDENTITY
from bishop_ray.search.journal import JOURNAL
from bishop_ray.search.scheduler import SCORE
from bishop_ray.search.space import unflatten
from bishop_ray.search.study import PARAMS, RESULT, STOPPED, last_value, locked, read_study, stopped_tags
from bishop_ray.tracking import SPOOL, KnownTrial, check_tracking, complete, public_uri, replay_spool, tracking_uri
from bishop_ray.tracking.client import sqlite_path
from bishop_ray.tracking.spool import Spool

KILLED = "interrupted: the study was killed"
_STATUS = {TrialState.COMPLETE: "FINISHED", TrialState.PRUNED: "KILLED", TrialState.FAIL: "FAILED"}


@dataclass(frozen=True)
class Synced:
    """What was done for a study.

    Attributes:
        study: Its name.
        events: Sent from its spool.
        runs: Completed or ended in MLflow.
        problem: Why nothing could be done, or "".
    """

    study: str
    events: int = 0
    runs: int = 0
    problem: str = ""


def known_trials(study: optuna.Study) -> list[KnownTrial]:
    """The study's trials in the words of MLflow, those included that go on."""
    trials = study.get_trials(deepcopy=False)
    return [_known(trial) for trial in trials if trial.state != TrialState.WAITING]


def _known(trial: FrozenTrial) -> KnownTrial:
    attrs = trial.user_attrs
    score = trial.value if trial.value is not None else last_value(trial)
    summary = {"seconds": attrs.get("seconds"), "best_val_score": score}
    summary["epochs"] = max(trial.intermediate_values, default=None)
    return KnownTrial(
        number=trial.number,
        params=unflatten(json.loads(attrs[PARAMS])) if PARAMS in attrs else trial.params,
        status=_STATUS.get(trial.state, ""),
        reason=str(attrs.get("reason", "")),
        started=_ms(trial.datetime_start),
        ended=_ms(trial.datetime_complete or trial.datetime_start),
        epochs={step: curves({SCORE: value}) for step, value in trial.intermediate_values.items()},
        summary={name: float(value) for name, value in summary.items() if value is not None},
        tags=stopped_tags(attrs.get(STOPPED, {})),
    )


def sync_studies(storage: Path, study: str = "", uri: str = "", study_db: str = "") -> Iterator[Synced]:
    """Sends what waits in the spools of studies, completes their runs from the studies, and ends what nobody runs.

    Args:
        storage: Where studies are kept.
        study: Only this one, by the name of its folder; "" for all.
        uri: MLflow address; "" for the default, which must be the one that the studies wrote to.
        study_db: Database of studies that are not kept in their folders.

    Yields:
        What was done, study by study, in the order of their names.

    Raises:
        UnknownName: No such study.
        UserError: A spool was meant for another address than the default one.
        SourceUnavailable: MLflow does not answer; nothing is lost.
    """
    place = storage / "studies"
    folders = {path.name: path for path in sorted(place.glob("*")) if path.is_dir()}
    if study and study not in folders:
        raise UnknownName("study", study, folders)
    chosen = [folders[study]] if study else list(folders.values())
    address = tracking_uri(uri)
    waiting = False
    for folder in chosen:
        meant = _meant_for(folder / SPOOL)
        waiting = waiting or bool(meant)
        if not uri and meant not in ("", public_uri(address)):
            raise UserError(
                f"--tracking-uri: expected {meant}, where {folder.name} wrote to, or an address to send it to instead; "
                f"found none, which means {public_uri(address)}"
            )
    if address.startswith("sqlite:") and not waiting and not sqlite_path(address).is_file():
        return  # checking would create it
    if chosen:
        check_tracking(address)
    for folder in chosen:
        yield _sync(folder, address, study_db)


def _sync(folder: Path, uri: str, study_db: str) -> Synced:
    try:
        with locked(folder):
            trials: list[KnownTrial] = []
            identity = ""
            finished = (folder / RESULT).is_file()
            if found := study_of(folder, study_db):
                trials, identity = known_trials(found), str(found.user_attrs.get("id", ""))
                finished = bool(found.user_attrs.get("result"))
            elif (folder / IDENTITY).is_file():  # a search over several models
                identity = (folder / IDENTITY).read_text("utf-8")
            end = ("FINISHED", "finished") if finished else ("KILLED", KILLED)
            events = replay_spool(folder / SPOOL, uri, *end)
            runs = complete(uri, identity, trials, *end) if identity else 0
    except UserError as error:
        if type(error) is not UserError:  # MLflow is away: so it is for the next study
            raise
        return Synced(folder.name, problem=str(error))
    return Synced(folder.name, events, runs)


def study_of(folder: Path, study_db: str) -> optuna.Study | None:
    """The study of a folder; None for a search over several models, whose studies have folders of their own.

    Args:
        folder: Named after the study; it holds its journal unless a database does.
        study_db: The database, "" for none.

    Raises:
        UserError: Its journal is damaged, or the database does not open.
    """
    if study_db:
        if study_db.startswith("sqlite") and not sqlite_path(study_db).is_file():  # Optuna would make it
            raise UserError(f"--study-db: expected the database of studies; found no file {sqlite_path(study_db)}")
        try:
            return optuna.load_study(study_name=folder.name, storage=study_db)
        except KeyError:
            pass  # one of those in a folder
        except Exception as error:  # of any database's driver
            shown = public_uri(study_db)
            raise SourceUnavailable(f"--study-db: cannot open {shown}: {type(error).__name__}") from None
    return read_study(folder) if (folder / JOURNAL).is_file() else None


def _meant_for(spool: Path) -> str:
    """The address a spool was written for, without credentials; "" for none."""
    events = Spool(spool).read().events
    return str(events[0].get("uri", "")) if events else ""


def _ms(moment: datetime | None) -> int:
    """Milliseconds since 1970 of Optuna's naive local times."""
    return int((moment or datetime.now()).timestamp() * 1000)
