"""Queries of MLflow: runs, metric histories, texts, runs as a frame."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bishop_ray.errors import UnknownName, UserError
from bishop_ray.tracking.client import (
    CALL_SECONDS,
    as_user_error,
    check_tracking,
    experiment_id,
    open_client,
    patient,
    public_uri,
    quoted,
    search_all,
    sqlite_path,
    tracking_uri,
)

if TYPE_CHECKING:
    import pandas as pd
    from mlflow.entities import Run


def study_run(uri: str, experiment: str, study: str, study_id: str) -> str:
    """The id of a study's parent run, the earliest of several.

    Args:
        uri: MLflow address, see `tracking_uri`.
        experiment: The study's experiment.
        study: Name of the study, for messages.
        study_id: The study's identity.

    Raises:
        UserError: No such run here: another store than the study's, or the run was deleted.
        SourceUnavailable: MLflow does not answer.
    """
    uri = tracking_uri(uri)
    if uri.startswith("sqlite:") and not sqlite_path(uri).is_file():  # checking would create it
        raise UserError(f"--tracking-uri: expected the MLflow store that {study} wrote to; no file {sqlite_path(uri)}")
    check_tracking(uri)
    client = open_client(uri, CALL_SECONDS)
    try:
        found = client.get_experiment_by_name(experiment)
        wanted = f"tags.`bishop.study_id` = {quoted(study_id)} AND tags.`bishop.kind` = 'study'"
        runs = search_all(client, [found.experiment_id], wanted) if found is not None else []
    except Exception as error:
        raise as_user_error(error, uri) from error
    if not runs:
        raise UserError(
            f"--tracking-uri: expected the MLflow store that {study} wrote to; no run of it in {public_uri(uri)}"
        )
    return str(runs[0].info.run_id)


def runs_frame(uri: str = "", experiment: str = "", study: str = "") -> pd.DataFrame:
    """Runs as a DataFrame: run_id, name, kind, trial, status, start, end, ``params.*``, ``metrics.*``, ``tags.*``.

    Args:
        uri: MLflow address, see `tracking_uri`.
        experiment: Only this experiment; empty for all.
        study: Only the runs of this study (parent and trials); empty for all.

    Raises:
        UnknownName: No such experiment.
    """
    import pandas as pd

    client = open_client(tracking_uri(uri), CALL_SECONDS)
    known = {str(found.name): str(found.experiment_id) for found in client.search_experiments()}
    if experiment and experiment not in known:
        raise UnknownName("experiment", experiment, known)
    ids = [known[experiment]] if experiment else list(known.values())
    runs = search_all(client, ids, f"tags.`bishop.study` = {quoted(study)}" if study else "") if ids else []
    return pd.DataFrame([_row(run) for run in runs])


def _row(run: Run) -> dict[str, Any]:
    tags = run.data.tags
    row: dict[str, Any] = {
        "run_id": run.info.run_id,
        "name": run.info.run_name,
        "kind": tags.get("bishop.kind", ""),
        "trial": int(tags["bishop.trial"]) if tags.get("bishop.trial", "").isdigit() else -1,
        "status": run.info.status,
        "start": run.info.start_time,
        "end": run.info.end_time,
    }
    row |= {f"params.{key}": value for key, value in run.data.params.items()}
    row |= {f"metrics.{key}": value for key, value in run.data.metrics.items()}
    row |= {f"tags.{key}": value for key, value in tags.items() if not key.startswith("mlflow.")}
    return row


REPORT = "report"
"""Kind of a run that holds a report, and the folder of its artifacts."""


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Attributes:
        run_id: MLflow's id.
        experiment: Name of its experiment.
        kind: Tag ``bishop.kind``: "study", "trial", "ablation", ... or "".
        status: MLflow's status.
        start: Milliseconds since 1970.
        end: The same, 0 while it runs.
        params: Parameters.
        metrics: Last values.
        tags: Tags.
    """

    run_id: str
    experiment: str
    kind: str
    status: str
    start: int
    end: int
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]


@dataclass(frozen=True)
class MetricPoint:
    """One value of a metric: its step, when it was reported (milliseconds since 1970), and the value."""

    step: int
    time: int
    value: float


class Reader:
    """Reads one MLflow store.

    Args:
        uri: MLflow address, see `tracking_uri`.

    Raises:
        UserError: No such SQLite file (opening it would create one), or not a store.
        SourceUnavailable: MLflow does not answer.
    """

    def __init__(self, uri: str = "") -> None:
        self.uri = tracking_uri(uri)
        if self.uri.startswith("sqlite:") and not sqlite_path(self.uri).is_file():
            raise UserError(f"--tracking-uri: expected an MLflow store; found no file {sqlite_path(self.uri)}")
        check_tracking(self.uri)
        self._client = open_client(self.uri, CALL_SECONDS)

    def experiments(self) -> dict[str, str]:
        """Name -> id of every active experiment."""
        try:
            return {str(e.name): str(e.experiment_id) for e in self._client.search_experiments()}
        except Exception as error:
            raise as_user_error(error, self.uri) from error

    def runs(self, tags: Mapping[str, str], experiment: str = "") -> list[RunRecord]:
        """Runs of an experiment (of all for "") that have these tags, oldest first.

        Raises:
            UnknownName: No such experiment.
            UserError: MLflow does not answer.
        """
        known = self.experiments()
        if experiment and experiment not in known:
            raise UnknownName("experiment", experiment, known)
        ids = [known[experiment]] if experiment else list(known.values())
        names = {number: name for name, number in known.items()}
        wanted = " AND ".join(f"tags.`{tag}` = {quoted(value)}" for tag, value in tags.items())
        try:
            found = search_all(self._client, ids, wanted) if ids else []
        except Exception as error:
            raise as_user_error(error, self.uri) from error
        return [_record(run, names[str(run.info.experiment_id)]) for run in found]

    def run(self, run_id: str) -> RunRecord:
        """The run of this id.

        Raises:
            UserError: There is none here, or it was deleted.
            SourceUnavailable: MLflow does not answer.
        """
        wanted = f"expected the id of a run in {self.shown}; found {run_id!r}"
        try:
            run = self._client.get_run(run_id)
            experiment = self._client.get_experiment(run.info.experiment_id)
        except Exception as error:
            if getattr(error, "error_code", "") in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                raise UserError(wanted) from None
            raise as_user_error(error, self.uri) from error
        if run.info.lifecycle_stage == "deleted":
            raise UserError(f"{wanted}, which was deleted")
        return _record(run, str(experiment.name))

    def course(self, run_id: str, metric: str) -> list[MetricPoint]:
        """All values of a metric by step; the first one counts where a step was repeated."""
        try:
            history = self._client.get_metric_history(run_id, metric)
        except Exception as error:
            raise as_user_error(error, self.uri) from error
        first: dict[int, MetricPoint] = {}
        for value in sorted(history, key=lambda m: (m.step, m.timestamp)):
            first.setdefault(int(value.step), MetricPoint(int(value.step), int(value.timestamp), float(value.value)))
        return list(first.values())

    def text(self, run_id: str, path: str) -> str:
        """A text artifact, "" where there is none or its store is out of reach."""
        from mlflow.exceptions import MlflowException

        with (
            suppress(MlflowException, OSError, UnicodeDecodeError),
            tempfile.TemporaryDirectory() as scratch,
            patient(),
        ):
            if path in {file.path for file in self._client.list_artifacts(run_id)}:
                return Path(self._client.download_artifacts(run_id, path, scratch)).read_text("utf-8")
        return ""

    def log_report(self, files: Iterable[Path], *, run_id: str = "", experiment: str = "", name: str = "") -> str:
        """Puts a report's files into folder `REPORT` of a run; returns the run's id.

        Args:
            files: The files.
            run_id: A study's own run; without one the run `name` of kind `REPORT` in `experiment`, both made when new.
            experiment: See `run_id`.
            name: See `run_id`.

        Raises:
            UserError: MLflow does not answer, or its artifacts cannot be written from here.
        """
        from mlflow.exceptions import MlflowException

        try:
            with patient():
                run_id = run_id or self._report_run(experiment, name)
                for file in files:
                    self._client.log_artifact(run_id, str(file), REPORT)
        except (MlflowException, OSError, TimeoutError) as error:
            raise as_user_error(error, self.uri) from error
        return run_id

    def _report_run(self, experiment: str, name: str) -> str:
        """The run of a report that is made again is the one it had."""
        tags = {"bishop.kind": REPORT, "bishop.report": name}
        place = experiment_id(self._client, self.uri, experiment)
        if old := self.runs(tags, experiment):
            return old[-1].run_id
        run = self._client.create_run(place, tags=tags, run_name=name)
        self._client.set_terminated(run.info.run_id)
        return str(run.info.run_id)

    def run_url(self, run_id: str) -> str:
        """Where the MLflow UI shows the run; of a database, as ``mlflow ui`` serves it on this machine.

        Raises:
            UserError: MLflow does not answer, or knows no such run.
        """
        from mlflow.exceptions import MlflowException

        try:
            experiment = self._client.get_run(run_id).info.experiment_id
        except (MlflowException, OSError, TimeoutError) as error:
            raise as_user_error(error, self.uri) from error
        base = self.shown if self.uri.startswith("http") else "http://127.0.0.1:5000"
        return f"{base}/#/experiments/{experiment}/runs/{run_id}"

    @property
    def shown(self) -> str:
        """The address without credentials."""
        return str(public_uri(self.uri))


def _record(run: Run, experiment: str) -> RunRecord:
    return RunRecord(
        run_id=str(run.info.run_id),
        experiment=experiment,
        kind=run.data.tags.get("bishop.kind", ""),
        status=str(run.info.status),
        start=int(run.info.start_time or 0),
        end=int(run.info.end_time or 0),
        params=dict(run.data.params),
        metrics=dict(run.data.metrics),
        tags={key: value for key, value in run.data.tags.items() if not key.startswith("mlflow.")},
    )
