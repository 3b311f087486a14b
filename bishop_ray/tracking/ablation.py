"""Runs of ablations in MLflow: each is written whole when it has ended, once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bishop_ray.tracking.client import CALL_SECONDS, experiment_id, open_client, quoted, search_all
from bishop_ray.tracking.naming import finite_metrics
from bishop_ray.tracking.sink import OPEN
from bishop_ray.tracking.writes import Writes

if TYPE_CHECKING:
    from mlflow.entities import Run


KIND, OLD_KIND = "ablation", "ablation-old"
"""Tag ``bishop.kind`` of the runs, and of those that a fresh start has left behind."""


@dataclass(frozen=True)
class EndedRun:
    """A run as MLflow gets it.

    Attributes:
        name: For people.
        key: Tells it from the other runs of its ablation.
        status: "FINISHED" or "FAILED".
        params: Its parameters, flat.
        metrics: Its results.
        tags: With its reason.
        epochs: Step -> metrics.
        started: Milliseconds since 1970.
        ended: Milliseconds since 1970.
    """

    name: str
    key: str
    status: str
    params: Mapping[str, Any]
    metrics: Mapping[str, float]
    tags: Mapping[str, str]
    epochs: Mapping[int, Mapping[str, float]]
    started: int
    ended: int


class AblationRuns(Writes):
    """Writes the runs of one ablation on one dataset.

    Args:
        uri: MLflow address, checked before.
        experiment: Name of the experiment.
        identity: Of the ablation; its runs carry it as the tag ``bishop.ablation_id``.
        tags: Of every run.
    """

    def __init__(self, uri: str, experiment: str, identity: str, tags: Mapping[str, str]) -> None:
        super().__init__(uri)
        self._name, self._identity = experiment, identity
        self._tags = {**tags, "bishop.kind": KIND, "bishop.ablation_id": identity, "mlflow.source.name": "bishop_ray"}
        self._experiment = ""
        self._found: dict[str, Run] = {}
        self._sent: dict[str, int] = {}

    def send(self, runs: Iterable[EndedRun]) -> None:
        """Writes the runs that MLflow does not have; one that failed, or was half written, is replaced.

        Raises:
            Exception: What MLflow raises; the same call again goes on.
        """
        if not self._experiment:
            self._look()
        for run in runs:
            if self._sent.get(run.key) != run.started:
                self._write(run)

    def _look(self) -> None:
        place = experiment_id(self.client, self.uri, self._name)
        for found in search_all(self.client, [place], f"tags.`bishop.ablation_id` = {quoted(self._identity)}"):
            key = found.data.tags.get("bishop.run", "")
            self._found[key] = found
            if found.info.status not in OPEN:
                self._sent[key] = int(found.info.start_time)
        self._experiment = place

    def _write(self, run: EndedRun) -> None:
        if old := self._found.pop(run.key, None):
            self.call(self.client.delete_run, old.info.run_id)
        tags = {**self._tags, **run.tags, "bishop.run": run.key}
        run_id = self.create(self._experiment, run.name, tags, run.started)
        self.params(run_id, run.params, {})
        for step, metrics in run.epochs.items():
            for name, value in finite_metrics(metrics)[0].items():
                self.metric(run_id, name, value, run.ended, step)
        for name, value in finite_metrics(run.metrics)[0].items():
            self.metric(run_id, name, value, run.ended, 0)
        self.flush(run_id)
        self.call(self.client.set_terminated, run_id, run.status, run.ended)
        self._found[run.key] = self.client.get_run(run_id)
        self._sent[run.key] = run.started


def supersede(uri: str, experiment: str, identity: str) -> None:
    """Marks the runs of an ablation as those of an earlier start: they no longer count.

    Raises:
        Exception: What MLflow raises.
    """
    client = open_client(uri, CALL_SECONDS)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return
    for run in search_all(client, [found.experiment_id], f"tags.`bishop.ablation_id` = {quoted(identity)}"):
        client.set_tag(run.info.run_id, "bishop.kind", OLD_KIND)
