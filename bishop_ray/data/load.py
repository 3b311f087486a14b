"""Loader of datasets: a reference becomes a `RawDataset`, from OpenML or a file, cached."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

from bishop_ray._compat.openml import task_description
from bishop_ray.data.files import load_embedded, load_file
from bishop_ray.data.openml_cache import ServerCache, cache_root
from bishop_ray.data.openml_client import DEFAULT_SERVER, Incomplete, ask, passing, server_url
from bishop_ray.data.paper_datasets import paper_set
from bishop_ray.data.paper_files import clean_paper, load_paper_file
from bishop_ray.data.refs import PAPER_TASKS, SUITES, DatasetRef, paper_ref, suite_group, suite_id, task_ref
from bishop_ray.data.schema import make_raw, with_roles
from bishop_ray.data.table import RawDataset
from bishop_ray.errors import UserError

logger = logging.getLogger(__name__)


def load_dataset(ref: DatasetRef) -> RawDataset:
    """The rows behind a reference; the same on every node.

    Raises:
        SourceUnavailable: The OpenML server does not answer in time and nothing is cached.
        BadTable: The table cannot be read or trained on.
        UserError: The task does not exist, or is of another kind; a column of the roles is unknown or unfit.
    """
    return with_roles(_read(ref), ref.roles, ref.locator if ref.kind == "file" else "")


def _read(ref: DatasetRef) -> RawDataset:
    if ref.kind == "file":
        return load_file(ref)
    if ref.kind == "embedded":
        return load_embedded(ref)
    cache = _cache(ref.server)
    if ref.kind == "paper":
        if not ref.locator.isdigit():
            return load_paper_file(ref)
        key = f"paper-{ref.name}"
        return cache.get(lambda: cache.read_table(key), lambda: _fetch_paper(cache, key, ref))
    return cache.get(lambda: cache.read_table(ref.locator), lambda: _fetch_table(cache, ref.locator))


def suite_datasets(suite: str, server: str = "", paper_tasks: bool = False) -> list[DatasetRef]:
    """The datasets of a suite, in the server's order; no rows are loaded.

    Datasets of one name get the task number behind it, all of them, so that no name depends on the order.

    Args:
        suite: ``CC NC CR NR`` in any case, or an OpenML study number.
        server: Address, or "" (`servers.server_url`).
        paper_tasks: Only the tasks that the paper reports.

    Raises:
        UnknownName: No such suite name.
        UserError: The server has no such suite, or the paper reports none of its tasks.
        SourceUnavailable: The server does not answer in time and the list is not cached.
    """
    number, group = suite_id(suite), suite_group(suite)
    cache = _cache(server)
    tasks = cache.get(lambda: cache.read_suite(number), lambda: _fetch_suite(cache, number))
    if paper_tasks:
        tasks = _paper_only(tasks, number, group)
    kept = "" if cache.server == DEFAULT_SERVER else cache.server
    refs = [DatasetRef("openml", task, name, group, server=kept) for task, name in tasks.items()]
    keys = Counter(ref.key.lower() for ref in refs)
    return [replace(r, name=f"{r.name}-{r.locator}") if keys[r.key.lower()] > 1 else r for r in refs]


def task_dataset(task_id: int | str, server: str = "") -> DatasetRef:
    """The reference of one OpenML task, with its dataset's name; fetches and caches the table.

    Raises:
        UserError: No such task.
        SourceUnavailable: The server does not answer in time and the task is not cached.
    """
    url = server_url(server)
    ref = task_ref(task_id, "" if url == DEFAULT_SERVER else url)
    return replace(ref, name=load_dataset(ref).name)


def paper_dataset(name: str, data_dir: str = "", server: str = "") -> DatasetRef:
    """The reference of one of the paper's nine tables, as `suites.paper_ref` makes it; no rows are loaded.

    Raises:
        UserError: No such name or folder, or neither the folder nor OpenML has the table.
    """
    url = server_url(server)
    return paper_ref(name, data_dir, "" if url == DEFAULT_SERVER else url)


def _cache(server: str) -> ServerCache:
    return ServerCache(cache_root(), server_url(server))


def _paper_only(tasks: dict[str, str], number: int, group: str) -> dict[str, str]:
    short = next((name for name, value in SUITES.items() if value == number), "")
    if not short:
        raise UserError(f"the paper reports no tasks of suite {group}; expected one of {', '.join(SUITES)}")
    wanted = [str(task) for task in PAPER_TASKS[short]]
    absent = [task for task in wanted if task not in tasks]
    if absent:
        logger.warning("suite %s: the server does not list the paper's tasks %s", group, ", ".join(absent))
    return {task: tasks[task] for task in wanted if task in tasks}


def _fetch_suite(cache: ServerCache, number: int) -> dict[str, str]:
    def fetch(openml: Any, _first: bool) -> dict[str, str]:
        suite = openml.study.get_suite(number)
        tasks = {}
        for task in suite.tasks or []:
            description = _describe(openml, int(task))
            tasks[str(task)] = str(openml.datasets.get_dataset(int(description.dataset_id)).name)
        return tasks

    tasks = ask(cache, f"suite {number}", fetch)
    cache.write_suite(number, tasks)
    return tasks


def _fetch_table(cache: ServerCache, task_id: str) -> RawDataset:
    def fetch(openml: Any, first: bool) -> RawDataset:
        if first:
            cache.seed(Path(openml.config.get_cache_directory()), task_id)
        return _download(openml, int(task_id))

    raw = ask(cache, f"task {task_id}", fetch)
    cache.write_table(task_id, raw)
    return raw


def _describe(openml: Any, task_id: int) -> Any:
    """The task's description, of a task that models here can do."""
    task = task_description(openml, task_id)
    if not isinstance(task, openml.tasks.OpenMLClassificationTask | openml.tasks.OpenMLRegressionTask):
        raise UserError(f"OpenML task {task_id}: expected classification or regression; found {task.task_type}")
    return task


def _fetch_paper(cache: ServerCache, key: str, ref: DatasetRef) -> RawDataset:
    record = paper_set(ref.name)

    def fetch(openml: Any, _first: bool) -> RawDataset:
        dataset, frame, _ = _frame(openml, int(ref.locator))
        turned = pd.concat([frame.iloc[record.rotate :], frame.iloc[: record.rotate]], ignore_index=True)
        return clean_paper(ref.name, turned, f"OpenML dataset {ref.locator} ({dataset.name})")

    raw = ask(cache, f"dataset {ref.locator} ({ref.name}; --data-dir names a folder of files instead)", fetch)
    cache.write_table(key, raw)
    return raw


def _download(openml: Any, task_id: int) -> RawDataset:
    task = _describe(openml, task_id)
    dataset, frame, nominal = _frame(openml, int(task.dataset_id))
    kind = "classification" if isinstance(task, openml.tasks.OpenMLClassificationTask) else "regression"
    where = f"OpenML task {task_id} ({dataset.name})"
    return make_raw(str(dataset.name), frame, str(task.target_name), kind, nominal, where)


def _frame(openml: Any, data_id: int) -> tuple[Any, pd.DataFrame, list[str]]:
    """Description, rows and nominal columns of a dataset."""
    dataset = openml.datasets.get_dataset(data_id, download_data=True)
    if dataset.parquet_file is not None:
        pq.read_metadata(dataset.parquet_file)  # the client raises a bare Exception for a broken file
    frame, _, categorical, names = dataset.get_data()
    expected = _expected_rows(openml, dataset)
    if expected is not None and expected != len(frame):
        raise Incomplete(f"{len(frame)} rows of {expected} arrived")
    frame = frame.set_axis(names, axis=1)
    for name in frame.columns:
        if hasattr(frame[name], "sparse"):
            frame[name] = frame[name].sparse.to_dense()
    return dataset, frame, [name for name, is_nominal in zip(names, categorical, strict=True) if is_nominal]


def _expected_rows(openml: Any, dataset: Any) -> int | None:
    """The row count the server tells, if it does: the one quality we need; a failure here costs nothing else."""
    try:
        rows = (dataset.qualities or {}).get("NumberOfInstances")
    except passing(openml) as error:
        logger.info("no row count of dataset %s: %s", dataset.dataset_id, error)
        return None
    return None if rows is None else int(rows)
