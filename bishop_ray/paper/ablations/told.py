"""What MLflow is told of an ablation's runs. The records on disk are what counts: MLflow may be away."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bishop_ray.config import StudyConfig
from bishop_ray.paper.ablations.records import COMPLETE, AblationRun, Records
from bishop_ray.search.dataset import Prepared
from bishop_ray.tracking import environment
from bishop_ray.tracking.ablation import AblationRuns, EndedRun, supersede
from bishop_ray.tracking.client import as_user_error


def experiment(name: str) -> str:
    """MLflow experiment of an ablation, all datasets together, as the paper's tables are."""
    return f"ablation-{name}"


class Told:
    """Sends runs as they end; after a failure, those that wait are sent at the end, or by the same command again.

    Attributes:
        problem: Why runs wait, "" if none do.
    """

    def __init__(
        self, study: StudyConfig, name: str, records: Records, prepared: Prepared, bases: Mapping[str, str]
    ) -> None:
        spec = prepared.data.spec
        self._bases = bases
        self._name, self._dataset, self._uri, self.problem = name, study.ref.key, study.tracking_uri, ""
        tags = {
            "dataset": study.ref.key,
            "suite": study.ref.group,
            "task": spec.task.value,
            "metric": study.metric,
            "data_hash": prepared.fingerprint,
            "rows": "/".join(map(str, prepared.rows)),
        }
        tags |= study.ref.roles.tag() | environment()
        self._runs = AblationRuns(study.tracking_uri, experiment(name), records.identity, tags)

    def send(self, records: Iterable[AblationRun], last: bool = False) -> None:
        """Sends runs; nothing is raised. After a failure only the `last` call tries again."""
        if self.problem and not last:
            return
        try:
            self._runs.send(self._as_run(record) for record in records)
            self.problem = ""
        except Exception as error:  # whatever MLflow raises: training does not wait for it
            self.problem = str(as_user_error(error, self._uri))

    def _as_run(self, record: AblationRun) -> EndedRun:
        ok = record.status == COMPLETE
        found = {"validation": record.validation, "test": record.test, "seconds": record.seconds}
        own = {"ablation": self._name, "setting": record.setting, "model": record.model, "seed": record.seed}
        return EndedRun(
            name=f"{self._dataset} {record.model} {record.setting} s{record.seed}",
            key=f"{record.setting}/{record.model}/{record.seed}",
            status="FINISHED" if ok else "FAILED",
            params={**own, **record.params},
            metrics={name: value for name, value in found.items() if value is not None},
            tags={
                "model": record.model,
                "base_setting": self._bases.get(record.model, ""),
                "bishop.reason": record.reason,
                "test_openings": str(record.test_openings),
            },
            epochs=record.epochs,
            started=int(record.started * 1000),
            ended=int((record.started + record.seconds) * 1000),
        )


def forget(uri: str, name: str, identity: str) -> None:
    """Marks the runs of an ablation that is started over.

    Raises:
        SourceUnavailable: MLflow does not answer: its old runs would count beside the new ones.
    """
    if not identity:
        return
    try:
        supersede(uri, experiment(name), identity)
    except Exception as error:
        raise as_user_error(error, uri) from error
