"""Promotion and rollback of aliases by hand."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bishop_ray.errors import UserError
from bishop_ray.metrics.bootstrap import Difference, paired_bootstrap
from bishop_ray.registry.aliases import CHALLENGER, CHAMPION, all_versions, holder, move_alias, versions_before
from bishop_ray.registry.compare import compare_stored, task_of
from bishop_ray.registry.gate import check_version, get_ready
from bishop_ray.registry.loading import load_best, resolve
from bishop_ray.tracking.client import as_user_error, from_mlflow, one_at_a_time, open_client, patient, tracking_uri

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient


@dataclass(frozen=True)
class Moved:
    """The end of a promotion or rollback.

    Attributes:
        alias: The alias.
        before: Version it pointed to, "" for none.
        after: Version it points to now.
        lines: What was found, for people; the last one says what was done or why nothing was.
    """

    alias: str
    before: str
    after: str
    lines: tuple[str, ...]
    done: bool


def promote(
    name: str, version: int, *, alias: str = CHAMPION, holdout: Path | None = None, force: bool = False, uri: str = ""
) -> Moved:
    """Points the alias to the version, if it passes the gate and a paired bootstrap finds it better than the holder.

    Args:
        name: Registered name.
        version: The version.
        alias: The alias.
        holdout: Table, with the target, of rows that neither of the two versions has seen; without, the validation
            rows count, whose predictions lie with both.
        force: Move it whatever gate and comparison say.
        uri: MLflow address.

    Raises:
        UnknownName: No such model or version.
        UserError: An odd alias, a hold-out file that does not fit, metrics that do not compare.
        SourceUnavailable: The server does not answer.
    """
    _check_alias(alias)
    with _registry(uri) as (client, uri):
        number = resolve(client, name, str(version))
        before = holder(client, name, alias)
        if before == number:
            return Moved(alias, before, before, (f"{name} {alias} is version {number} already",), True)
        lines, reasons = [], []
        failure = _gate(client, uri, name, number)
        if failure:
            reasons.append(f"the gate stays shut: {failure}")
        if before and not (failure and not force):
            try:
                difference = _difference(client, uri, name, number, before, holdout)
                lines.append(f"version {number} against version {before}: {difference.words()}")
                if not difference.better:
                    reasons.append(f"version {number} is not better than version {before} beyond chance")
            except UserError as error:
                if holdout is not None and not force:
                    raise
                reasons.append(str(error) if holdout else f"{error}; --holdout compares on rows of a file")
        if reasons and not force:
            lines.append(f"{name} {alias} stays {_words(before)}: {'; '.join(reasons)}")
            return Moved(alias, before, before, tuple(lines), False)
        words = f"forced, although {'; '.join(reasons)}" if reasons else "; ".join(lines) or "no version had it before"
        move_alias(client, name, alias, number, f"promoted: {words}")
        if alias == CHAMPION and holder(client, name, CHALLENGER) == number:
            client.delete_registered_model_alias(name, CHALLENGER)
        lines.append(f"{name} {alias}: {_words(before)} -> version {number}" + (f" ({words})" if reasons else ""))
        return Moved(alias, before, number, tuple(lines), True)


def rollback(name: str, *, alias: str = CHAMPION, force: bool = False, uri: str = "") -> Moved:
    """Points the alias to the version it had before, through the gate; called again, to the one before that.

    Versions that were deleted are passed over.

    Args:
        name: Registered name.
        alias: The alias.
        force: Move it although the gate stays shut.
        uri: MLflow address.

    Raises:
        UnknownName: No such model, or it has no such alias.
        SourceUnavailable: The server does not answer.
    """
    with _registry(uri) as (client, uri):
        present = resolve(client, name, alias)
        line = versions_before(client.get_registered_model(name), alias)
        # Moved by other hands, or by a call that was killed before it wrote the history.
        line = line[:-1] if line and line[-1] == present else line
        there = {str(v.version) for v in all_versions(client, name)}
        before = next((version for version in reversed(line) if version in there and version != present), "")
        if not before:
            reason = f"{name} {alias} stays version {present}: no earlier version is in its history"
            return Moved(alias, present, present, (reason,), False)
        failure = _gate(client, uri, name, before)
        if failure and not force:
            reason = f"{name} {alias} stays version {present}: the gate stays shut for version {before}: {failure}"
            return Moved(alias, present, present, (reason,), False)
        words = "rolled back" + (f", forced, although the gate stays shut: {failure}" if failure else "")
        move_alias(client, name, alias, before, words, back=True)
        done = f"{name} {alias}: version {present} -> version {before} ({words})"
        return Moved(alias, present, before, (done,), True)


@contextmanager
def _registry(uri: str) -> Iterator[tuple[MlflowClient, str]]:
    """A client of the registry, which nobody else on this machine changes meanwhile, and its address."""
    uri = tracking_uri(uri)
    get_ready()
    with patient(), one_at_a_time(uri):
        try:
            yield open_client(uri), uri
        except Exception as error:
            if not from_mlflow(error):
                raise
            raise as_user_error(error, uri) from error


def _gate(client: MlflowClient, uri: str, name: str, version: str) -> str:
    """Why it stays shut, or ""; noted at the version."""
    with tempfile.TemporaryDirectory(prefix="bishop-gate-") as scratch:
        result = check_version(uri, name, version, Path(scratch))
    client.set_model_version_tag(name, version, "bishop.gate", result.tag)
    return result.failure


def _difference(
    client: MlflowClient, uri: str, name: str, version: str, before: str, holdout: Path | None
) -> Difference:
    new, old = (client.get_model_version(name, number) for number in (version, before))
    if holdout is None:
        return compare_stored(new, old, uri)
    from bishop_ray.registry.compare import score_file

    metric, task = new.tags.get("bishop.metric", ""), task_of(new)
    sides = [score_file(load_best(name, number, uri), holdout) for number in (version, before)]
    try:
        return paired_bootstrap(metric, task, *sides)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"--holdout {holdout}: {error}") from None


def _check_alias(alias: str) -> None:
    if not re.fullmatch(r"[\w-]{1,255}", alias) or re.fullmatch(r"[vV]?\d+", alias) or alias.lower() == "latest":
        raise UserError(f"--alias: expected letters, digits, '_' and '-', not 'latest' or v1; found {alias!r}")


def _words(version: str) -> str:
    return f"version {version}" if version else "unset"
