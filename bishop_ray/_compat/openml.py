"""Private parts of the openml client: what it makes its requests with, descriptions of tasks alone."""

from __future__ import annotations

import logging
import types
from typing import Any

VERIFIED = "0.15.1"
"""The version that all of this was read and tried in; ``pyproject.toml`` allows its minor series alone."""


def request_through(openml: Any, session: type, minio: type) -> None:
    """Has the client, and nobody else in this process, make its requests with classes of ours.

    It passes no time-outs to requests and minio, and takes no session. Its log of calls gets a logger of its own in
    the place of the root logger, where it would install a handler. Seen in openml 0.15.1: `openml._api_calls` reaches
    all three by the names of their modules.

    Args:
        openml: The client's module.
        session: In the place of `requests.Session`.
        minio: In the place of `minio.Minio`.
    """
    calls = openml._api_calls
    calls.requests = variant(calls.requests, Session=session)
    calls.minio = variant(calls.minio, Minio=minio)
    calls.logging = logging.getLogger("openml.calls")


def variant(module: types.ModuleType, **changes: Any) -> types.ModuleType:
    """A copy of a module's names with some of them replaced."""
    copy = types.ModuleType(module.__name__)
    copy.__dict__.update({**vars(module), **changes})
    return copy


def task_description(openml: Any, task_id: int) -> Any:
    """Only the task's description: the public `get_task` also asks for features and fails when they do.

    Seen in openml 0.15.1.
    """
    return openml.tasks.functions._get_task_description(task_id)
