"""Cache of OpenML downloads, shared by processes of one node.

The client's own cache is not safe when several processes fill it, and a failed call deletes parts of it. So a fetched
table becomes one Parquet file and a small JSON file with its digest, each moved into place in one step; readers need
neither lock nor network nor the client. Fetching goes on under a file lock, one process per cache folder at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlparse
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from bishop_ray.data.refs import path_part
from bishop_ray.data.table import RawDataset, TaskType
from bishop_ray.errors import SourceUnavailable, UserError
from bishop_ray.paths import replacing_file

T = TypeVar("T")
logger = logging.getLogger(__name__)
FORMAT = 1
LOCK_SECONDS = 1800.0
"""How long a process waits for another one's download."""


def cache_root() -> Path:
    """``OPENML_CACHE_DIR``, which is the client's too, else ``~/.cache/bishop_ray/openml``."""
    return Path(os.environ.get("OPENML_CACHE_DIR") or "~/.cache/bishop_ray/openml").expanduser().absolute()


@dataclass(frozen=True)
class ServerCache:
    """The cached suites and tables of one server.

    Attributes:
        root: `cache_root`.
        server: The server's address.
    """

    root: Path
    server: str

    @property
    def folder(self) -> Path:
        """Where this server's files lie; other servers may give other data the same number."""
        return self.root / "bishop_ray" / path_part(urlparse(self.server).netloc)

    def table_path(self, task_id: str) -> Path:
        """The normalised table of a task, or of another ``kind-name``."""
        return self.folder / f"{f'task-{task_id}' if task_id.isdigit() else task_id}.parquet"

    def read_table(self, task_id: str) -> RawDataset | None:
        """The table of a task, or None when it is not there or damaged."""
        path = self.table_path(task_id)
        try:
            meta = json.loads(path.with_suffix(".json").read_text("utf-8"))
            content = path.read_bytes()
            if meta["format"] != FORMAT or meta["sha256"] != hashlib.sha256(content).hexdigest():
                raise ValueError("other format or content")
            name, target, task, categorical = meta["name"], meta["target"], TaskType(meta["task"]), meta["categorical"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("cached table %s is damaged (%s): fetching it again", path, _one_line(error))
            return None
        frame = pq.read_table(pa.BufferReader(content)).to_pandas()
        return RawDataset(name, frame.drop(columns=target), frame[target], task, tuple(categorical))

    def write_table(self, task_id: str, raw: RawDataset) -> None:
        """Stores the table of a task, then its description: a reader in between sees a damaged table and waits."""
        frame = raw.frame.assign(**{str(raw.target.name): raw.target})
        path = self.table_path(task_id)
        with replacing_file(path) as part:
            pq.write_table(pa.Table.from_pandas(frame, preserve_index=False), part, compression="zstd")
            digest = hashlib.sha256(part.read_bytes()).hexdigest()
        meta = {
            "format": FORMAT,
            "name": raw.name,
            "target": str(raw.target.name),
            "task": raw.task.value,
            "categorical": list(raw.categorical),
            "rows": len(raw),
            "sha256": digest,
        }
        with replacing_file(path.with_suffix(".json")) as part:
            part.write_text(json.dumps(meta, indent=1), "utf-8")

    def read_suite(self, suite: int) -> dict[str, str] | None:
        """Task id -> dataset name of a suite, in the server's order, or None when it is not there or damaged."""
        path = self.folder / f"suite-{suite}.json"
        try:
            content = json.loads(path.read_text("utf-8"))
            return {str(int(task)): str(name) for task, name in content["tasks"].items()}
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("cached suite %s is damaged (%s): fetching it again", path, _one_line(error))
            return None

    def write_suite(self, suite: int, tasks: dict[str, str]) -> None:
        """Stores a suite's tasks, in one step."""
        with replacing_file(self.folder / f"suite-{suite}.json") as part:
            part.write_text(json.dumps({"format": FORMAT, "suite": suite, "tasks": tasks}, indent=1), "utf-8")

    def get(self, read: Callable[[], T | None], fetch: Callable[[], T]) -> T:
        """`read()`, or else, under the lock, `read()` again or `fetch()`.

        A process that waited for the lock while another one found the server dead does not try it once more: many
        processes give up together, not one after the other.

        Raises:
            SourceUnavailable: `fetch` does, for us or the one we waited for; or the lock stays taken.
            UserError: The cache folder cannot be written.
        """
        found = read()
        if found is not None:
            return found
        arrived = time.time()
        with self._locked():
            found = read()
            if found is not None:
                return found
            failure = self.folder / "unreachable.txt"
            with contextlib.suppress(FileNotFoundError):
                if failure.stat().st_mtime >= arrived:
                    raise SourceUnavailable(failure.read_text("utf-8"))
            try:
                return fetch()
            except SourceUnavailable as error:
                failure.write_text(str(error), "utf-8")
                raise

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """An empty folder for one fetch, gone afterwards; call it under the lock only."""
        for left in self.folder.glob("fetch-*"):  # of a process that was killed: we hold the lock
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="fetch-", ignore_cleanup_errors=True) as name:
            yield Path(name)

    def seed(self, client_folder: Path, task_id: str) -> None:
        """Copies the whole ones of a task's files from the user's own client cache into `client_folder`.

        So a cache that the client has filled serves us offline, and nothing we do can harm it.

        Args:
            client_folder: The client's folder for this server inside a `staging` folder.
            task_id: The task.
        """
        staging = next(parent for parent in client_folder.parents if parent.name.startswith("fetch-"))
        shared = self.root / client_folder.relative_to(staging)
        task = shared / "tasks" / task_id / "task.xml"
        found = None
        with contextlib.suppress(OSError, UnicodeError):
            found = re.search(r"<oml:data_set_id>\s*(\d+)\s*<", task.read_text("utf-8"))
        files = [task]
        if found:
            folder = shared / "datasets" / found[1]
            files += [folder / name for name in ("description.xml", "qualities.xml", f"dataset_{found[1]}.pq")]
        for file in files:
            with contextlib.suppress(OSError, UnicodeError, ElementTree.ParseError, pa.ArrowException):
                if file.suffix == ".pq":
                    pq.read_table(file)
                else:
                    ElementTree.fromstring(file.read_text("utf-8"))  # noqa: S314 - the client parses it anyway
                copy = client_folder / file.relative_to(shared)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with FileLock(self.folder / "lock", timeout=LOCK_SECONDS, is_singleton=False):
                yield
        except Timeout:
            raise SourceUnavailable(f"another process has held {self.folder / 'lock'} for {LOCK_SECONDS:g} s") from None
        except (PermissionError, NotADirectoryError, FileExistsError) as error:
            raise UserError(
                f"the OpenML cache folder {self.folder} cannot be written ({error.strerror}); "
                f"set OPENML_CACHE_DIR to another one"
            ) from None


def _one_line(error: Any) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
