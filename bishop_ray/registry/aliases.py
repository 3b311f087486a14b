"""Aliases that move, with their history, so that a move can be taken back.

Every move is a tag of the registered model, ``bishop.move.ALIAS.NUMBER``: a JSON object with ``time``, ``from``,
``to``, ``reason`` and, of a move that took others back, ``back``. The alias moves first, the tag is written after it: a
process killed in between leaves an alias that works and a history that ends one move earlier, and so it is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from bishop_ray.tracking.client import quoted
from bishop_ray.tracking.naming import clean

if TYPE_CHECKING:
    from mlflow.entities.model_registry import ModelVersion, RegisteredModel
    from mlflow.tracking import MlflowClient


CHAMPION, CHALLENGER = "champion", "challenger"
PAGE = 1000
"""Models or versions that a server is asked for at a time."""
_LONGEST = 1000
"""Characters of a reason; databases hold 5,000 of a tag."""


@dataclass(frozen=True)
class Move:
    """An alias that went from one version to another.

    Attributes:
        time: UTC, ISO 8601.
        before: Version it left, "" for a new alias.
        after: Version it went to.
        reason: Why.
        back: It took earlier moves back.
    """

    time: str
    before: str
    after: str
    reason: str
    back: bool = False


def move_alias(client: MlflowClient, name: str, alias: str, version: str, reason: str, back: bool = False) -> None:
    """Points the alias to the version and notes it; what a killed call left out is completed."""
    model = client.get_registered_model(name)
    before = _holder(model, alias)
    known = versions_before(model, alias)
    if before == version and known and known[-1] == version:
        return
    if before != version:
        client.set_registered_model_alias(name, alias, version)
    else:
        before = known[-1] if known else ""
    move = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "from": before, "to": version}
    move |= {"reason": clean(reason)[:_LONGEST]}
    number = len([key for key in model.tags if key.startswith(_key(alias))])
    # Not as ASCII: a letter would become six, and a long reason too long for a tag.
    text = json.dumps(move | ({"back": 1} if back else {}), ensure_ascii=False)
    client.set_registered_model_tag(name, f"{_key(alias)}{number:06d}", text)


def moves(model: RegisteredModel, alias: str) -> list[Move]:
    """All moves of an alias, the earliest first."""
    found = []
    for key, text in sorted(model.tags.items()):
        if key.startswith(_key(alias)):
            row = json.loads(text)
            found.append(Move(row["time"], row["from"], row["to"], row["reason"], bool(row.get("back"))))
    return found


def versions_before(model: RegisteredModel, alias: str) -> list[str]:
    """The versions that an alias has pointed to and that no later move took back, the present one last.

    A version set by other hands, without a move, counts when the next move leaves it.
    """
    line: list[str] = []
    for move in moves(model, alias):
        if move.back and move.after in line:
            while line[-1] != move.after:
                line.pop()
            continue
        for version in (move.before, move.after):
            if version and (not line or line[-1] != version):
                line.append(version)
    return line


def holder(client: MlflowClient, name: str, alias: str) -> str:
    """The version behind the alias now, "" for none."""
    return _holder(client.get_registered_model(name), alias)


def all_versions(client: MlflowClient, name: str) -> list[ModelVersion]:
    """All versions of a registered model, however many."""
    found: list[ModelVersion] = []
    token = None
    while True:
        page = client.search_model_versions(f"name = {quoted(name)}", max_results=PAGE, page_token=token)
        found += list(page)
        token = page.token
        if not token:
            return found


def all_models(client: MlflowClient) -> list[RegisteredModel]:
    """All registered models."""
    found: list[RegisteredModel] = []
    token = None
    while True:
        page = client.search_registered_models(max_results=PAGE, page_token=token)
        found += list(page)
        token = page.token
        if not token:
            return found


def _holder(model: RegisteredModel, alias: str) -> str:
    found = model.aliases.get(alias)
    return "" if found is None else str(found)


def _key(alias: str) -> str:
    return f"bishop.move.{alias}."
