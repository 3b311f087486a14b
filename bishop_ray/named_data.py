"""The datasets that the data flags name."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from bishop_ray import cli
from bishop_ray.addresses import told
from bishop_ray.data.paper_sets import PAPER_SETS
from bishop_ray.data.roles import Roles
from bishop_ray.data.suites import EMBEDDED, DatasetRef, embedded_ref, file_ref
from bishop_ray.errors import SourceUnavailable, UserError

if TYPE_CHECKING:
    from bishop_ray.tuning.suite import Failure

logger = logging.getLogger(__name__)


def datasets(args: argparse.Namespace) -> tuple[list[DatasetRef], list[Failure]]:
    """The datasets of the flags, and the tasks of several that cannot be had.

    Raises:
        UserError: Flags that do not fit together, unknown names, an unreachable server.
    """
    roles = Roles(args.weights, args.groups, args.time, args.balance)
    refs, failures = _datasets(args, cli.one_source(args))
    return [replace(ref, roles=roles) for ref in refs], failures


def _datasets(args: argparse.Namespace, source: str) -> tuple[list[DatasetRef], list[Failure]]:
    if source == "dataset":
        return [named_ref(name, args) for name in cli.known("dataset", args.dataset, (*EMBEDDED, *PAPER_SETS))], []
    if source == "table":
        return [file_ref(args.table, args.target or "", args.task_type or "")], []
    from bishop_ray.data.sources import suite_datasets, task_dataset

    if source == "suite":
        return suite_datasets(args.suite, args.openml_server, args.paper_tasks), []
    found, failures = obtained(args.task, lambda task: task_dataset(task, args.openml_server), "task ")
    return list(found.values()), failures


def obtained(
    names: Iterable[str], find: Callable[[str], DatasetRef], prefix: str = ""
) -> tuple[dict[str, DatasetRef], list[Failure]]:
    """By name, the datasets that can be had; and the others, `prefix` before their names, with the reason.

    Raises:
        UserError: None can be had: the reason of the first.
    """
    refs, errors = {}, {}
    for name in dict.fromkeys(names):
        try:
            refs[name] = find(name)
        except UserError as error:
            errors[name] = error
            if isinstance(error, SourceUnavailable):  # took its time, and the next one may take it too
                logger.warning("%s%s: %s", prefix, name, told(error))
    if not refs:
        raise next(iter(errors.values()))
    from bishop_ray.tuning.suite import Failure

    return refs, [Failure(f"{prefix}{name}", "all models", told(error)) for name, error in errors.items()]


def named_ref(name: str, args: argparse.Namespace) -> DatasetRef:
    """The reference of a name: one of scikit-learn's tables, or of the paper's.

    Raises:
        UserError: The paper's table is neither in ``--data-dir`` nor on OpenML.
    """
    if name in EMBEDDED:
        return embedded_ref(name)
    from bishop_ray.data.sources import paper_dataset

    return paper_dataset(name, args.data_dir or os.environ.get("BISHOP_DATA_DIR", "").strip(), args.openml_server)
