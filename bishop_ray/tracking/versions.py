"""What is in the registry, as records."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from bishop_ray.errors import UnknownName
from bishop_ray.tracking.address import tracking_uri
from bishop_ray.tracking.aliases import all_models, all_versions
from bishop_ray.tracking.guards import from_mlflow, patient
from bishop_ray.tracking.store import as_user_error, open_client

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel
    from mlflow.tracking import MlflowClient


@dataclass(frozen=True)
class VersionRow:
    """A version.

    Attributes:
        name: Registered name.
        version: Its number.
        aliases: Those that point to it.
        model: What predicts.
        metric: Selection metric.
        val_score: Validation score, larger is better; None where none was noted.
        test_score: The same of the test rows.
        trained_on: Its rows.
        gate: "passed: ...", "failed: ...", or "" where it was registered before there was a gate.
        champion: Why it became champion, or not.
        created: UTC, ISO 8601.
        size_bytes: Of the predictor's files, 0 where that was not noted.
    """

    name: str
    version: int
    aliases: tuple[str, ...]
    model: str
    metric: str
    val_score: float | None
    test_score: float | None
    trained_on: str
    gate: str
    champion: str
    created: str
    size_bytes: int


def list_versions(name: str = "", uri: str = "") -> list[VersionRow]:
    """The versions of all registered models, or of one; by name, the newest first.

    Raises:
        UnknownName: No such registered model.
        SourceUnavailable: The server does not answer.
    """
    uri = tracking_uri(uri)
    with patient():
        try:
            client = open_client(uri)
            models = {str(model.name): model for model in all_models(client)}
            if name and name not in models:
                raise UnknownName("registered model", name, models)
            return [row for key in ([name] if name else sorted(models)) for row in _rows(client, models[key])]
        except Exception as error:
            if not from_mlflow(error):
                raise
            raise as_user_error(error, uri) from error


def _rows(client: MlflowClient, model: RegisteredModel) -> list[VersionRow]:
    aliases: dict[str, list[str]] = {}
    for alias, number in sorted(model.aliases.items()):
        aliases.setdefault(str(number), []).append(alias)
    rows = [
        _row(version, tuple(aliases.get(str(version.version), ()))) for version in all_versions(client, str(model.name))
    ]
    return sorted(rows, key=lambda row: -row.version)


def _row(version: ModelVersion, aliases: tuple[str, ...]) -> VersionRow:
    tags = version.tags
    created = datetime.fromtimestamp(version.creation_timestamp / 1000, UTC).isoformat(timespec="seconds")
    size = tags.get("bishop.size_bytes", "")
    return VersionRow(
        str(version.name), int(version.version), aliases, tags.get("bishop.model", ""), tags.get("bishop.metric", ""),
        _number(tags.get("val_score")), _number(tags.get("test_score")), tags.get("trained_on", ""),
        tags.get("bishop.gate", ""), tags.get("bishop.champion", ""), created, int(size) if size.isdigit() else 0,
    )  # fmt: skip


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
