"""From a study's events to MLflow runs. Applying an event twice leaves what applying it once leaves."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bishop_ray.tracking.client import experiment_id, quoted, search_all
from bishop_ray.tracking.naming import finite_metrics, safe_key
from bishop_ray.tracking.writes import Writes, table_json

if TYPE_CHECKING:
    from mlflow.entities import Run


Event = dict[str, Any]
"""JSON-able: ``kind`` (study, known, start, metrics, finish, final, close), ``time`` in ms, the kind's own fields."""
PARENT = -1
"""Stands for the parent run where a trial number is expected."""
OPEN = ("RUNNING", "SCHEDULED")
STOPPED_TAG = "bishop.stopped."
"""How the tags of a trial begin that the scheduler stopped: which rung, its epoch, its cut-off, the trial's score."""
LOOK_SECONDS = 5.0
"""Between two looks for runs that a busy server makes late."""
_log = logging.getLogger(__name__)


class RunSink(Writes):
    """Writes the runs of one study.

    Runs are found by their tags ``bishop.study_id``, ``bishop.kind`` and ``bishop.trial``, so that a study that
    goes on (or a spool that is replayed) writes to the runs it had. A step of a metric is written once: where a trial
    repeats epochs after an interruption, the first value counts, as in the study.
    """

    def __init__(self, uri: str) -> None:
        super().__init__(uri)
        self.parent_id = ""
        self.run_ids: dict[int, str] = {}
        """Trial number -> run id, of this study."""
        self._study: Event = {}
        self._experiment = ""
        self._failed = False
        self._ended: dict[int, tuple[str, dict[str, str]]] = {}
        self._deleted: set[int] = set()
        self._own: set[str] = set()
        self._steps: dict[str, dict[str, set[int]]] = {}
        self._nonfinite: dict[int, set[tuple[int, str]]] = {}
        self._mapped: dict[str, str] = {}

    def apply(self, events: Sequence[Event]) -> None:
        """Writes `events` in their order; metrics of all trials go out batched, before their run is finished.

        The first events ever must begin with the study's header. After a failure the same events come again.
        """
        self._waiting.clear()  # left by a call that failed
        handlers: dict[str, Callable[[Event], None]] = {
            "study": self._on_study,
            "known": self._on_known,
            "start": self._on_start,
            "metrics": self._on_metrics,
            "finish": self._on_finish,
            "final": self._on_final,
            "close": self._on_close,
        }
        if self._failed and self._study and events and events[0]["kind"] != "study":
            self._on_study(self._study)  # a call that failed here may have succeeded there
        self._failed = True
        for event in events:
            if handler := handlers.get(event["kind"]):  # else of a newer version
                handler(event)
        self.flush()
        self._failed = False
        for number in [event["trial"] for event in events if event["kind"] == "finish"]:
            self._nonfinite.pop(number, None)

    def _on_study(self, event: Event) -> None:
        self.flush()  # of an earlier process: what MLflow has is looked up from here on
        self._study = event
        self._experiment = experiment_id(self.client, self.uri, event["experiment"])
        for found in (self.run_ids, self._ended, self._deleted, self._own, self._steps):
            found.clear()
        parent = self._find()
        tags = {**self._tags("study"), **event["tags"]}
        if parent is None:
            self.parent_id = self.create(self._experiment, event["study"], tags, event["time"])
            self._own.add(self.parent_id)
        else:
            self.parent_id = parent.info.run_id
            self._reopen(self.parent_id, tags)
        self.params(self.parent_id, event["params"], parent.data.params if parent else {})
        self.texts(self.parent_id, event["texts"])
        self.flush(self.parent_id)

    def _find(self) -> Run | None:
        """Finds the runs of all trials; returns that of the study.

        Where a creation timed out here and yet succeeded there, two stand for one: the fuller counts.
        """
        best: dict[int, Run] = {}
        for run in self._runs(deleted=True):
            number = number_of(run)
            if run.info.lifecycle_stage == "deleted":
                self._deleted.add(number)
            elif number not in best or _size(run) > _size(best[number]):
                best[number] = run
        self.run_ids.update({number: run.info.run_id for number, run in best.items() if number != PARENT})
        self._ended.update({number: end_of(run) for number, run in best.items() if run.info.status not in OPEN})
        return best.get(PARENT)

    def _runs(self, deleted: bool = False) -> list[Run]:
        wanted = f"tags.`bishop.study_id` = {quoted(self._study['study_id'])}"
        found = search_all(self.client, [self._experiment], wanted, deleted)
        return [run for run in found if run.data.tags.get("bishop.kind") in ("study", "trial")]

    def _tags(self, kind: str) -> dict[str, str]:
        return {
            "bishop.study": self._study["study"],
            "bishop.study_id": self._study["study_id"],
            "bishop.kind": kind,
            "mlflow.source.name": "bishop_ray",
            "mlflow.source.type": "JOB",
        }

    def _on_known(self, event: Event) -> None:
        """Completes what MLflow has of a trial that the study knows; nothing where both tell the same end."""
        number, status = event["trial"], event["status"]
        if number in self._deleted and number not in self.run_ids:
            return  # someone does not want it
        if status and self._ended.get(number) == (status, event.get("tags", {})):
            return  # all of a run is written before its end
        run_id = self.run_ids.get(number, "")
        if not run_id or not self.client.get_run(run_id).data.params:
            self.params(self._child(number, event["started"]), event["params"], {})
        for step, metrics in event["epochs"]:
            self._on_metrics({**event, "step": step, "metrics": metrics})
        if status:
            self._on_finish({**event, "step": 0, "tags": event.get("tags", {})})  # an older version's spool has none

    def _on_start(self, event: Event) -> None:
        number = event["trial"]
        run_id, existing = self.run_ids.get(number, ""), {}
        if run_id:
            self._reopen(run_id, event["tags"])
            existing = self.client.get_run(run_id).data.params
        else:
            run_id = self._child(number, event["time"], event["tags"])
        self.params(run_id, event["params"], existing)

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
            self.run_ids[number] = self.create(self._experiment, name, all_tags, time)
            self._own.add(self.run_ids[number])
        return self.run_ids[number]

    def _on_metrics(self, event: Event) -> None:
        number = event["trial"]
        finite, skipped = finite_metrics(event["metrics"])
        if skipped:  # a set: a replayed event counts once
            self._nonfinite.setdefault(number, set()).update((event["step"], name) for name in skipped)
        run_id = self._child(number, event["time"])
        for name, value in finite.items():
            key = self._key(name)
            steps = self._written(run_id, key)
            if event["step"] not in steps:
                steps.add(event["step"])
                self.metric(run_id, key, value, event["time"], event["step"])

    def _key(self, name: str) -> str:
        key = safe_key(name)
        if key != name and self._mapped.get(key) != name:
            self._mapped[key] = name
            self.tag(self.parent_id, {f"bishop.metric_name.{key}"[:250]: name})
            _log.info("metric %r is recorded as %r", name, key)
        return key

    def _written(self, run_id: str, key: str) -> set[int]:
        """The steps of a metric that MLflow has, or that are on their way."""
        steps = self._steps.setdefault(run_id, {})
        if key not in steps:
            known = [] if run_id in self._own else self.client.get_metric_history(run_id, key)
            steps[key] = {metric.step for metric in known}
        return steps[key]

    def _on_finish(self, event: Event) -> None:
        number = event["trial"]
        if event["metrics"]:
            self._on_metrics(event)
        run_id = self._child(number, event["time"])
        tags = {**event["tags"], "bishop.reason": event["reason"]}
        if self._nonfinite.get(number):
            tags["bishop.nonfinite_metrics"] = len(self._nonfinite[number])
        self.tag(run_id, tags)
        self.flush(run_id)
        self.call(self.client.set_terminated, run_id, event["status"], event["time"])
        # A thousand trials' steps are megabytes; where one begins anew, MLflow is asked.
        self._steps.pop(run_id, None)
        self._own.discard(run_id)

    def _on_final(self, event: Event) -> None:
        finite, _ = finite_metrics(event["metrics"])
        before = self.client.get_run(self.parent_id).data.metrics
        for name, value in finite.items():
            key = self._key(name)
            if before.get(key) != value:  # a study that is extended has new ones, of the same step
                self.metric(self.parent_id, key, value, event["time"], event["step"])
        self.tag(self.parent_id, event["tags"])
        texts = {**event["texts"], **{path: table_json(rows) for path, rows in event["tables"].items()}}
        self.texts(self.parent_id, texts)
        if event["tables"]:  # what MLflow's own log_table writes: the UI shows the file as a table
            listed = [{"path": path, "type": "table"} for path in event["tables"]]
            self.tag(self.parent_id, {"mlflow.loggedArtifacts": json.dumps(listed)})

    def _on_close(self, event: Event) -> None:
        self.flush()
        self._settle(event)
        while (left := self.late_until - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_SECONDS))
            self._settle(event)
        self.tag(self.parent_id, {"bishop.reason": event["reason"]} if event["reason"] else {})
        self.flush()
        self.call(self.client.set_terminated, self.parent_id, event["status"], event["time"])

    def _settle(self, event: Event) -> None:
        """Leaves one run for each trial, and none of them open."""
        ours = {**self.run_ids, PARENT: self.parent_id}
        for run in self._runs():
            number, run_id = number_of(run), run.info.run_id
            if ours.get(number, run_id) != run_id:  # see `_find`
                self.call(self.client.set_terminated, run_id, "KILLED", event["time"])
                self.call(self.client.delete_run, run_id)
            elif run.info.status in OPEN and number != PARENT:
                self.tag(run_id, {"bishop.reason": event["child_reason"]})
                self.flush(run_id)
                self.call(self.client.set_terminated, run_id, "KILLED", event["time"])

    def _reopen(self, run_id: str, tags: Mapping[str, Any]) -> None:
        self.call(self.client.update_run, run_id, "RUNNING")
        self.tag(run_id, tags)


def number_of(run: Run) -> int:
    """The trial that a run stands for, `PARENT` for the study's own."""
    number = run.data.tags.get("bishop.trial", "")
    return int(number) if number.isdigit() else PARENT


def end_of(run: Run) -> tuple[str, dict[str, str]]:
    """How a run ended: its status, and the tags of a trial that the scheduler stopped."""
    return run.info.status, {key: value for key, value in run.data.tags.items() if key.startswith(STOPPED_TAG)}


def _size(run: Run) -> int:
    return len(run.data.params) + len(run.data.metrics)
