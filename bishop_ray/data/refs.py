"""References to datasets (suite task, file, embedded table), suites, and the roles of columns.

Suite and task numbers: Grinsztajn et al. 2022 on OpenML (334 CC, 337 NC, 335 CR, 336 NR).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from bishop_ray.data.paper_datasets import PAPER_SETS
from bishop_ray.errors import BadTable, UnknownName, UserError

ROLES = "roles"
"""Name of the tag that a study's run has in MLflow, if its rows have roles."""


@dataclass(frozen=True)
class Roles:
    """What the rows of a table are to be trained with and split by; all of it is optional.

    Attributes:
        weights: Column of row weights: they count in the training loss, never in a score.
        groups: Column of groups that stay together in a split.
        time: Column by which the split is ordered: the latest rows are the test rows.
        balance: Every class weighs the same in training (classification only).
    """

    weights: str = ""
    groups: str = ""
    time: str = ""
    balance: bool = False

    def __post_init__(self) -> None:
        if self.groups and self.time:
            raise UserError(
                f"--groups and --time exclude each other, a split is by one of them; found --groups {self.groups!r} "
                f"and --time {self.time!r}"
            )
        for flag, name in (("--groups", self.groups), ("--time", self.time)):
            if name and name == self.weights:
                raise UserError(f"--weights and {flag}: expected two columns; found {name!r} twice")

    def __bool__(self) -> bool:
        """Whether anything is asked for."""
        return self != NO_ROLES

    @property
    def weighted(self) -> bool:
        """Whether the training rows weigh differently."""
        return bool(self.weights) or self.balance

    def columns(self) -> dict[str, str]:
        """Flag -> name of every column that is named."""
        every = {"--weights": self.weights, "--groups": self.groups, "--time": self.time}
        return {flag: name for flag, name in every.items() if name}

    def facts(self) -> dict[str, str]:
        """All four in words, as a study compares them."""
        columns = {"weights": self.weights, "groups": self.groups, "time": self.time}
        return {key: repr(name) if name else "none" for key, name in columns.items()} | {
            "balance": "yes" if self.balance else "no"
        }

    def told(self) -> dict[str, str]:
        """Those of `facts` that were asked for: nothing, if none was."""
        before = NO_ROLES.facts()
        return {key: value for key, value in self.facts().items() if value != before[key]}

    def tag(self) -> dict[str, str]:
        """The tag `ROLES` of a study's run in MLflow; nothing, if nothing was asked for."""
        return {ROLES: str(self)} if self else {}

    def __str__(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in self.told().items()) or "none"


NO_ROLES = Roles()
SUITES: dict[str, int] = {"CC": 334, "NC": 337, "CR": 335, "NR": 336}
"""Short names of the paper's four suites -> OpenML study id."""
PAPER_TASKS: dict[str, tuple[int, ...]] = {
    "CC": (361282, 361283, 361286),
    "CR": (361093, 361094, 361099, 361104, 361288),
    "NC": (361055, 361062, 361065, 361273, 361278),
    "NR": (361073, 361074, 361077, 361079, 361081, 361280),
}
"""The paper's own tasks of each suite (appendix, table "Details of Datasets", OpenML)."""
EMBEDDED: tuple[str, ...] = ("breast_cancer", "diabetes", "digits", "iris", "wine")
"""Tables that scikit-learn ships."""
TASK_TYPES: tuple[str, ...] = ("regression", "classification", "binary", "multiclass")
"""What ``--task-type`` accepts."""
TABLE_SUFFIXES: tuple[str, ...] = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
"""Files that can be read as a table."""
LONGEST_PART = 120
"""Bytes of a `path_part`: names of files and folders may have 255, and what is made of a key adds to it."""
_RESERVED = {"CON", "PRN", "AUX", "NUL", *(f"{port}{n}" for port in ("COM", "LPT") for n in range(10))}
"""Names that Windows gives to devices, with any suffix."""


def path_part(name: str) -> str:
    """`name` as one step of a path on any system: never empty, hidden, "..", a device of Windows, or too long.

    Letters and digits of any script, ".", "_" and "-" stay. A name that is cut ends with eight letters of its hash.
    """
    safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in name).strip("._-") or "table"
    if safe.partition(".")[0].upper() in _RESERVED:
        safe = f"table_{safe}"
    if len(safe.encode()) <= LONGEST_PART:
        return safe
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"{safe.encode()[: LONGEST_PART - 9].decode(errors='ignore')}-{digest}"


@dataclass(frozen=True)
class DatasetRef:
    """A name that any node turns into the same rows.

    Attributes:
        kind: "openml" (a task id), "file", "embedded" or "paper" (one of the nine tables, a file or an OpenML data id).
        locator: Task id, data id, absolute path, or embedded name, as text.
        name: The dataset's own name, for people.
        group: Suite or family, e.g. "CR"; empty for single tables.
        target: Target column (files only).
        task_type: Forced task type (files only), or "" to infer it.
        server: OpenML server address, or "" for the default.
        roles: Columns that say something of the rows; `sources.load_dataset` reads them.
    """

    kind: str
    locator: str
    name: str
    group: str = ""
    target: str = ""
    task_type: str = ""
    server: str = ""
    roles: Roles = NO_ROLES

    @property
    def key(self) -> str:
        """Name of study, registered model and folder: ``CR-abalone``, ``361093-analcatdata_supreme``, ``iris``."""
        safe = path_part(self.name)
        return f"{path_part(self.group)}-{safe}" if self.group else safe

    @property
    def experiment(self) -> str:
        """MLflow experiment: one per suite or table; loose tasks share one."""
        return "openml-tasks" if self.group == self.locator else (path_part(self.group) if self.group else self.key)


def suite_id(name: str) -> int:
    """The OpenML study id behind ``CC NC CR NR`` (any case) or a number.

    Raises:
        UnknownName: Neither a short name nor a positive number.
    """
    text = name.strip()
    if text.upper() in SUITES:
        return SUITES[text.upper()]
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise UnknownName("suite", name, SUITES)


def suite_group(name: str) -> str:
    """The `group` of a suite's datasets: the short name in capitals, or the number as given, without zeros in front."""
    number = suite_id(name)
    return name.strip().upper() if name.strip().upper() in SUITES else str(number)


def task_ref(task_id: int | str, server: str = "", name: str = "") -> DatasetRef:
    """A single OpenML task; `sources.task_dataset` also looks up the dataset's `name`.

    Raises:
        UserError: The id is no positive number.
    """
    text = str(task_id).strip()
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UserError(f"an OpenML task id must be a positive number; found {str(task_id)!r}")
    locator = str(int(text))
    return DatasetRef("openml", locator, name or f"task_{locator}", group=locator, server=server)


def file_ref(path: str | Path, target: str, task_type: str = "") -> DatasetRef:
    """A CSV, TSV or Parquet file and its target column; the file is not opened yet.

    Raises:
        BadTable: No such file, a folder, or a suffix that is none of `TABLE_SUFFIXES`.
        UnknownName: `task_type` is none of `TASK_TYPES`.
        UserError: No target column is named.
    """
    file = Path(path).expanduser().resolve()
    suffix = next((s for s in sorted(TABLE_SUFFIXES, key=len, reverse=True) if file.name.lower().endswith(s)), "")
    if not suffix:
        raise BadTable(f"{path}: expected a file ending in {', '.join(TABLE_SUFFIXES)}; found {file.name!r}")
    if not file.is_file():
        found = "a folder" if file.is_dir() else "no such file"
        raise BadTable(f"{path}: expected a table file; found {found}")
    if not target:
        raise UserError(f"{path}: expected the name of the target column; found none")
    if task_type and task_type not in TASK_TYPES:
        raise UnknownName("task type", task_type, TASK_TYPES)
    name = file.name[: -len(suffix)] or "table"
    return DatasetRef("file", str(file), name, target=target, task_type=task_type)


def embedded_ref(name: str) -> DatasetRef:
    """One of scikit-learn's tables.

    Raises:
        UnknownName: Not one of `EMBEDDED`.
    """
    if name not in EMBEDDED:
        raise UnknownName("dataset", name, EMBEDDED)
    return DatasetRef("embedded", name, name)


def paper_ref(name: str, data_dir: str = "", server: str = "") -> DatasetRef:
    """One of the paper's nine single tables: a file of the folder, else OpenML's copy where there is one.

    Args:
        name: One of `paper_sets.PAPER_SETS`.
        data_dir: Folder of ``NAME.parquet``, ``NAME.csv``, ...; "" for none.
        server: OpenML address, or "" for the default.

    Raises:
        UnknownName: None of the nine.
        UserError: No such folder, or neither it nor OpenML has the table.
    """
    if name not in PAPER_SETS:
        raise UnknownName("dataset", name, [*EMBEDDED, *PAPER_SETS])
    record = PAPER_SETS[name]
    if data_dir:
        folder = Path(data_dir).expanduser().resolve()
        if not folder.is_dir():
            raise UserError(f"--data-dir: expected a folder; found {data_dir!r}, {_what(folder)}")
        for suffix in reversed(TABLE_SUFFIXES):
            if (file := folder / f"{name}{suffix}").is_file():
                return DatasetRef("paper", str(file), name, "paper")
    if record.openml is None:
        raise UserError(
            f"--dataset {name}: OpenML has no whole copy of it; expected {name}.parquet, .csv or .tsv in the folder "
            f"of --data-dir or BISHOP_DATA_DIR; found {f'none in {data_dir}' if data_dir else 'no folder named'} "
            f"(the original: {record.url})"
        )
    return DatasetRef("paper", str(record.openml), name, "paper", server=server)


def _what(path: Path) -> str:
    return "a file" if path.exists() else "no such path"


@dataclass(frozen=True)
class DatasetFacts:
    """A line of ``--list-datasets``.

    Attributes:
        name: What a user types.
        kind: Where it comes from.
        task: "binary", "multiclass", "regression", or "classification" for a suite.
        rows: Number of rows, None where only the server knows.
        features: Number of feature columns, None where only the server knows.
    """

    name: str
    kind: str
    task: str
    rows: int | None = None
    features: int | None = None


_EMBEDDED_FACTS: dict[str, tuple[str, int, int]] = {
    "breast_cancer": ("binary", 569, 30),
    "diabetes": ("regression", 442, 10),
    "digits": ("multiclass", 1797, 64),
    "iris": ("multiclass", 150, 4),
    "wine": ("multiclass", 178, 13),
}


def list_datasets() -> list[DatasetFacts]:
    """What has a name: the suites, scikit-learn's tables, the paper's nine tables; asks no server."""
    suites = [
        DatasetFacts(name, f"OpenML suite {number}", "classification" if name[1] == "C" else "regression")
        for name, number in SUITES.items()
    ]
    embedded = [DatasetFacts(name, "scikit-learn", *_EMBEDDED_FACTS[name]) for name in EMBEDDED]
    papers = [
        DatasetFacts(
            name,
            f"OpenML data {record.openml} or --data-dir" if record.openml else "--data-dir",
            record.task,
            record.rows,
            len(record.columns) - 1,
        )
        for name, record in PAPER_SETS.items()
    ]
    return suites + embedded + papers
