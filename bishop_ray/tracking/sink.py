"""From a study's events to MLflow runs. Applying an event twice leaves what applying it once leaves."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from bishop_ray.tracking.guards import is_final
from bishop_ray.tracking.names import finite_metrics, safe_key, short_tags, split_params
from bishop_ray.tracking.store import experiment_id, open_client, quoted, reason, search_all

if TYPE_CHECKING:
    from mlflow.entities import Metric, Run
    from mlflow.tracking import MlflowClient

Event = dict[str, Any]
"""JSON-able: ``kind`` (study, start, metrics, finish, final, close), ``time`` in ms, and the kind's own fields."""

PARENT = -1
"""Stands for the parent run where a trial number is expected."""

_log = logging.getLogger(__name__)


class RunSink:
    """Writes the runs of one study. Used by one thread; every method raises when MLflow does not answer.

    Runs are found by their tags ``bishop.study_id``, ``bishop.kind`` and ``bishop.trial``, so that a study that
    goes on (or a spool that is replayed) writes to the runs it had.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.parent_id = ""
        self.run_ids: dict[int, str] = {}
        """Trial number -> run id, of this study."""
        self.give_up = False
        """Set by another thread: the next write raises, and what is left stays with the caller."""
        self.dropped = 0
        """Writes that MLflow refused for good (a run deleted by someone, for example)."""
        self._client: MlflowClient | None = None
        self._study: Event = {}
        self._experiment = ""
        self._nonfinite: dict[int, set[tuple[int, str]]] = {}
        self._mapped: dict[str, str] = {}
        self._pending: dict[str, list[Metric]] = {}

    @property
    def client(self) -> MlflowClient:
        """The MLflow client, made at first use: importing mlflow takes more than a second."""
        if self.give_up:
            raise TimeoutError("no time left")
        if self._client is None:
            self._client = open_client(self.uri)
        return self._client

    def apply(self, events: Iterable[Event]) -> None:
        """Writes `events` in their order; metrics of all trials go out batched, before their run is finished."""
        self._pending.clear()  # left by a call that failed: its events come again
        handlers: dict[str, Callable[[Event], None]] = {
            "study": self._on_study,
            "start": self._on_start,
            "metrics": self._on_metrics,
            "finish": self._on_finish,
            "final": self._on_final,
            "close": self._on_close,
        }
        for event in events:
            handlers[event["kind"]](event)
        self._flush()

    # The study --------------------------------------------------------------------------------------------------

    def _on_study(self, event: Event) -> None:
        self._study = event
        self._experiment = experiment_id(self.client, self.uri, event["experiment"])
        self.run_ids.clear()
        self.parent_id = ""
        parent: Run | None = None
        for run in self._runs():
            number = run.data.tags.get("bishop.trial", "")
            if number.isdigit():
                self.run_ids.setdefault(int(number), run.info.run_id)
            elif run.data.tags.get("bishop.kind") == "study" and parent is None:
                parent = run
        tags = {**self._tags("study"), **event["tags"]}
        if parent is None:
            self.parent_id = self._create(event["study"], tags, event["time"])
        else:
            self.parent_id = parent.info.run_id
            self._reopen(parent.info.run_id, tags)
        self._params(self.parent_id, event["params"], parent.data.params if parent else {})
        self._texts(self.parent_id, event["texts"])

    def _runs(self) -> list[Run]:
        return search_all(
            self.client, [self._experiment], f"tags.`bishop.study_id` = {quoted(self._study['study_id'])}"
        )

    def _tags(self, kind: str) -> dict[str, str]:
        return {
            "bishop.study": self._study["study"],
            "bishop.study_id": self._study["study_id"],
            "bishop.kind": kind,
            "mlflow.source.name": "bishop_ray",
            "mlflow.source.type": "JOB",
        }

    # Trials -----------------------------------------------------------------------------------------------------

    def _on_start(self, event: Event) -> None:
        number = event["trial"]
        run_id, existing = self.run_ids.get(number, ""), {}
        if run_id:
            self._reopen(run_id, event["tags"])
            existing = self.client.get_run(run_id).data.params
        else:
            run_id = self._child(number, event["time"], event["tags"])
        self._params(run_id, event["params"], existing)

    def _child(self, number: int, time: int, tags: Mapping[str, Any] | None = None) -> str:
        """The run of a trial, created when there is none; of the parent for `PARENT`."""
        if number == PARENT:
            return self.parent_id
        if number not in self.run_ids:
            own = {"mlflow.parentRunId": self.parent_id, "bishop.trial": str(number)}
            shared = {key: value for key, value in self._study["tags"].items() if not key.startswith("version.")}
            all_tags = {**shared, **(tags or {}), **self._tags("trial"), **own}
            # A list of a whole suite's runs, sorted by score, must still say whose trial this is.
            name = f"trial-{number:04d} {self._study['tags'].get('dataset', '')}".rstrip()
            self.run_ids[number] = self._create(name, all_tags, time)
        return self.run_ids[number]

    def _on_metrics(self, event: Event) -> None:
        from mlflow.entities import Metric

        number = event["trial"]
        finite, skipped = finite_metrics(event["metrics"])
        if skipped:  # a set: a replayed event counts once
            self._nonfinite.setdefault(number, set()).update((event["step"], name) for name in skipped)
        batch = self._pending.setdefault(self._child(number, event["time"]), [])
        for name, value in finite.items():
            key = safe_key(name)
            if key != name and self._mapped.get(key) != name:
                self._mapped[key] = name
                self._tag(self.parent_id, {f"bishop.metric_name.{key}"[:250]: name})
                _log.info("metric %r is recorded as %r", name, key)
            batch.append(Metric(key, value, event["time"], event["step"]))

    def _on_finish(self, event: Event) -> None:
        number = event["trial"]
        if event["metrics"]:
            self._on_metrics(event)
        run_id = self._child(number, event["time"])
        self._flush(run_id)
        tags = {**event["tags"], "bishop.reason": event["reason"]}
        if self._nonfinite.get(number):
            tags["bishop.nonfinite_metrics"] = len(self._nonfinite[number])
        self._tag(run_id, tags)
        self._call(self.client.set_terminated, run_id, event["status"], event["time"])

    # The end ----------------------------------------------------------------------------------------------------

    def _on_final(self, event: Event) -> None:
        self._on_metrics(event)
        self._tag(self.parent_id, event["tags"])
        texts = {**event["texts"], **{path: _table_json(rows) for path, rows in event["tables"].items()}}
        self._texts(self.parent_id, texts)
        if event["tables"]:  # what MLflow's own log_table writes: the UI shows the file as a table
            listed = [{"path": path, "type": "table"} for path in event["tables"]]
            self._tag(self.parent_id, {"mlflow.loggedArtifacts": json.dumps(listed)})

    def _on_close(self, event: Event) -> None:
        self._flush()
        for run in self._runs():
            number = run.data.tags.get("bishop.trial", "")
            if not number.isdigit():
                continue
            if self.run_ids.get(int(number), run.info.run_id) != run.info.run_id:
                # A creation that timed out here and yet succeeded there, repeated: the second run has the data.
                self._call(self.client.delete_run, run.info.run_id)
            elif run.info.status in ("RUNNING", "SCHEDULED"):
                self._tag(run.info.run_id, {"bishop.reason": event["child_reason"]})
                self._call(self.client.set_terminated, run.info.run_id, "KILLED", event["time"])
        self._tag(self.parent_id, {"bishop.reason": event["reason"]} if event["reason"] else {})
        self._call(self.client.set_terminated, self.parent_id, event["status"], event["time"])

    # Single writes ----------------------------------------------------------------------------------------------

    def _create(self, name: str, tags: Mapping[str, Any], time: int) -> str:
        run = self.client.create_run(self._experiment, start_time=time, tags=short_tags(tags), run_name=name)
        self._dataset(str(run.info.run_id))
        return str(run.info.run_id)

    def _dataset(self, run_id: str) -> None:
        """Names the data in MLflow's own field, which its UI shows and filters by."""
        from mlflow.entities import Dataset, DatasetInput

        tags = self._study["tags"]
        if tags.get("dataset") and tags.get("data_hash"):
            data = Dataset(tags["dataset"], tags["data_hash"], source_type="code", source="{}")
            self._call(self.client.log_inputs, run_id, [DatasetInput(data, [])])

    def _reopen(self, run_id: str, tags: Mapping[str, Any]) -> None:
        self._call(self.client.update_run, run_id, "RUNNING")
        self._tag(run_id, tags)

    def _tag(self, run_id: str, tags: Mapping[str, Any]) -> None:
        from mlflow.entities import RunTag

        items = [RunTag(key, value) for key, value in short_tags(tags).items()]
        for start in range(0, len(items), 100):
            self._call(self.client.log_batch, run_id, (), (), items[start : start + 100])

    def _params(self, run_id: str, params: Mapping[str, Any], existing: Mapping[str, str]) -> None:
        from mlflow.entities import Param

        short, long = split_params(params)
        items = [Param(key, value) for key, value in short.items() if key not in existing]
        for start in range(0, len(items), 100):
            self._call(self.client.log_batch, run_id, (), items[start : start + 100])
        # MLflow never changes a parameter; a study that goes on with a larger budget says so in a tag.
        changed = {f"bishop.now.{k}"[:250]: v for k, v in short.items() if existing.get(k, v) != v}
        self._tag(run_id, changed)
        self._texts(run_id, long)

    def _texts(self, run_id: str, texts: Mapping[str, str]) -> None:
        for path, text in texts.items():
            self._call(self.client.log_text, run_id, text, path)

    def _flush(self, only: str = "") -> None:
        """Sends the waiting metrics of one run, or of all."""
        for run_id in [only] if only else list(self._pending):
            metrics = self._pending.pop(run_id, [])
            for start in range(0, len(metrics), 1000):
                self._call(self.client.log_batch, run_id, metrics[start : start + 1000])

    def _call(self, function: Callable[..., Any], *args: Any) -> None:
        """Calls MLflow. What trying again cannot help is counted and dropped, or it would hold up all the rest:
        a run deleted by someone, an artifact store that this machine cannot write to. Everything else is raised.
        """
        try:
            function(*args)
        except Exception as error:
            if not is_final(error):
                raise
            self.dropped += 1
            name = getattr(function, "__name__", "a write")
            _log.warning("MLflow %s failed for good and was skipped: %s", name, reason(error))


def _table_json(rows: list[dict[str, Any]]) -> str:
    """Rows as the JSON that ``mlflow.load_table`` reads (pandas' "split" form)."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return json.dumps({"columns": columns, "data": [[row.get(name) for name in columns] for row in rows]})
