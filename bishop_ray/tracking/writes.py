"""Single writes to MLflow, batched as far as its API goes; what can never succeed is counted and left out."""

from __future__ import annotations

import json
import logging
import os
import time as clock
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bishop_ray.tracking.client import CALL_SECONDS, is_final, open_client, reason
from bishop_ray.tracking.naming import clean, short_tags, split_params

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient


METRICS, OTHERS = 800, 100
"""What goes in a call: MLflow takes 100 parameters, 100 tags, and 1,000 of all together."""
NAME, DATASET = 250, 500
"""Characters that databases other than SQLite have for the name of a run and of a dataset."""
LATE_SECONDS = 30.0
"""How long after a slow creation a busy server may still make the run that was asked of it before."""
_log = logging.getLogger(__name__)


@dataclass
class Waiting:
    """What goes to one run with its next call."""

    metrics: list[Metric] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)


class Writes:
    """Writes runs and what belongs to them. Used by one thread; every method raises when MLflow does not answer."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.give_up = False
        """Set by another thread: the next write raises, and what is left stays with the caller."""
        self.dropped = 0
        """Writes that MLflow refused for good (a run deleted by someone, for example)."""
        self.late_until = 0.0
        """Until this time (of `time.monotonic`) a run that was asked for twice may come a second time."""
        self._client: MlflowClient | None = None
        self._waiting: dict[str, Waiting] = {}

    @property
    def client(self) -> MlflowClient:
        """The MLflow client, made at first use: importing mlflow takes more than a second."""
        if self.give_up:
            raise TimeoutError("no time left")
        if self._client is None:
            self._client = open_client(self.uri, CALL_SECONDS)
        return self._client

    def create(self, experiment: str, name: str, tags: Mapping[str, Any], time: int) -> str:
        """The id of a new run, which names its dataset in MLflow's own field: its UI shows and filters by it."""
        from mlflow.entities import Dataset, DatasetInput

        asked = clock.monotonic()
        try:
            run = self.client.create_run(
                experiment, start_time=time, tags=short_tags(tags), run_name=clean(name)[:NAME]
            )
        finally:
            # Its client asks again by itself, and so do we; a server that was only slow does what each of them asked.
            if clock.monotonic() - asked >= float(os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")):
                self.late_until = clock.monotonic() + LATE_SECONDS
        run_id = str(run.info.run_id)
        if tags.get("dataset") and tags.get("data_hash"):
            data = Dataset(tags["dataset"][:DATASET], tags["data_hash"][:36], source_type="code", source="{}")
            self.call(self.client.log_inputs, run_id, [DatasetInput(data, [])])
        return run_id

    def of(self, run_id: str) -> Waiting:
        """What waits for the run's next call."""
        return self._waiting.setdefault(run_id, Waiting())

    def metric(self, run_id: str, key: str, value: float, time: int, step: int) -> None:
        """A metric of a run, to go with its next call."""
        from mlflow.entities import Metric

        self.of(run_id).metrics.append(Metric(key, value, time, step))

    def tag(self, run_id: str, tags: Mapping[str, Any]) -> None:
        """Tags of a run, to go with its next call."""
        self.of(run_id).tags.update(short_tags(tags))

    def params(self, run_id: str, params: Mapping[str, Any], existing: Mapping[str, str]) -> None:
        """Parameters of a run, to go with its next call, but for those it has."""
        short, long = split_params(params)
        self.of(run_id).params.update({key: value for key, value in short.items() if key not in existing})
        # MLflow never changes a parameter; a study that goes on with a larger budget says so in a tag.
        self.tag(run_id, {f"bishop.now.{k}"[:250]: v for k, v in short.items() if existing.get(k, v) != v})
        self.texts(run_id, long)

    def texts(self, run_id: str, texts: Mapping[str, str]) -> None:
        """Text artifacts of a run, by path."""
        for path, text in texts.items():
            self.call(self.client.log_text, run_id, text, path)

    def flush(self, only: str = "") -> None:
        """Sends what waits for one run, or for all: mostly one call for each."""
        for run_id in [only] if only else list(self._waiting):
            waiting = self._waiting.pop(run_id, Waiting())
            params, tags = list(waiting.params.items()), list(waiting.tags.items())
            metrics = waiting.metrics
            while metrics or params or tags:
                self._log(run_id, metrics[:METRICS], params[:OTHERS], tags[:OTHERS])
                metrics, params, tags = metrics[METRICS:], params[OTHERS:], tags[OTHERS:]

    def _log(
        self, run_id: str, metrics: list[Metric], params: list[tuple[str, str]], tags: list[tuple[str, str]]
    ) -> None:
        from mlflow.entities import Param, RunTag

        parts = (metrics, [Param(*pair) for pair in params], [RunTag(*pair) for pair in tags])
        try:
            self.client.log_batch(run_id, *parts)
        except Exception as error:
            if not is_final(error):
                raise
            # One that MLflow refuses, a parameter changed by hand perhaps, must not take the others with it.
            nothing: tuple[list[Any], ...] = ([], [], [])
            for place, part in enumerate(parts):
                if part:
                    self.call(self.client.log_batch, run_id, *nothing[:place], part, *nothing[place + 1 :])

    def call(self, function: Callable[..., Any], *args: Any) -> None:
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


def table_json(rows: list[dict[str, Any]]) -> str:
    """Rows as the JSON that ``mlflow.load_table`` reads (pandas' "split" form)."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return json.dumps({"columns": columns, "data": [[row.get(name) for name in columns] for row in rows]})
