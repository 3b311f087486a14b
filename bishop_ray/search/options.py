"""Options of a search: frozen records whose fields are the flags of the command line too. Imports nothing heavy.

A field's metadata holds what its flag says. `cli.flags` makes the flags from it; made in Python, a record checks its
values by the same rules and with the same words.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from bishop_ray.errors import UserError


def positive_int(text: str) -> int:
    """A whole number >= 1."""
    return _whole(text, 1)


def non_negative_int(text: str) -> int:
    """A whole number >= 0."""
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    if not re.fullmatch(r"[0-9]+", text.strip()) or int(text) < least:
        raise UserError(f"expected a whole number >= {least}; found {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    """A number > 0."""
    return _number(text, "> 0", lambda value: value > 0)


def non_negative_float(text: str) -> float:
    """A number >= 0."""
    return _number(text, ">= 0", lambda value: value >= 0)


def _number(text: str, wanted: str, fits: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not fits(value):
        raise UserError(f"expected a number {wanted}; found {text!r}")
    return value


def duration(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``30m``, ``1.5h`` or ``1h30m``."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms])", text.strip())
    if "".join(n + u for n, u in parts) == text.strip() and parts:
        seconds = sum(float(n) * units[u] for n, u in parts)
    else:
        seconds = float(text) if re.fullmatch(r"\d+(?:\.\d+)?", text.strip()) else 0.0
    if seconds <= 0:
        raise UserError(f"expected a duration such as 90s, 30m or 1h30m; found {text!r}")
    return seconds


DATA = "data (one of --suite, --task, --table, --dataset)"
ROWS = "rows"
SEARCH = "search"
PLACE = "where trials run"
RECORDS = "records"


def _option(
    default: Any,
    group: str,
    text: str,
    metavar: str = "",
    read: Callable[[str], Any] | None = None,
    choices: tuple[str, ...] = (),
    training: bool = False,
) -> Any:
    """A field that is a flag: of its `group`, with the help `text`; `training`: every job that trains has it."""
    about = {"group": group, "help": text, "metavar": metavar, "read": read, "choices": choices, "training": training}
    return field(default=default, metadata=about)


def flag(name: str, default: Any = None) -> str:
    """The flag of a field: ``--time-budget``; of one that is True by default, what turns it off."""
    return f"--{'no-' if default is True else ''}{name.replace('_', '-')}"


class Options:
    """A record of flags; its values are checked, and texts read, as the command line does it.

    Raises:
        UserError: A value that the flag of its name would not take.
    """

    def __post_init__(self) -> None:
        for option in fields(self):  # type: ignore[arg-type]
            value, about = getattr(self, option.name), option.metadata
            if value is None or value == option.default:
                continue
            if "tuple" in str(option.type):
                object.__setattr__(self, option.name, (value,) if isinstance(value, str) else tuple(value))
            if about["choices"] and value not in about["choices"]:
                expected = ", ".join(map(repr, about["choices"]))
                raise UserError(f"argument {flag(option.name)}: invalid choice: {value!r} (choose from {expected})")
            if about["read"]:
                try:
                    object.__setattr__(self, option.name, about["read"](str(value)))
                except UserError as error:
                    raise UserError(f"argument {flag(option.name)}: {error}") from None


@dataclass(frozen=True)
class DataOptions(Options):
    """Which datasets, and what their columns say of the rows."""

    suite: str | None = _option(None, DATA, "CC, NC, CR, NR (OpenML 334, 337, 335, 336) or any suite id", "NAME")
    paper_tasks: bool = _option(False, DATA, "only the paper's own tasks of the suite")
    task: tuple[str, ...] | None = _option(None, DATA, "OpenML task ids", "ID")
    table: str | None = _option(None, DATA, "a .csv, .tsv or .parquet file", "FILE")
    target: str | None = _option(None, DATA, "target column of --table", "COLUMN")
    task_type: str | None = _option(None, DATA, "regression or classification; inferred when not given", "TYPE")
    dataset: tuple[str, ...] | None = _option(None, DATA, "tables by name: --list-datasets shows them", "NAME")
    data_dir: str = _option("", DATA, "files of the paper's tables (BISHOP_DATA_DIR)", "DIR")
    openml_server: str = _option("", DATA, "OpenML address (or BISHOP_OPENML_SERVER)", "URL")
    weights: str = _option("", ROWS, "column of row weights (>= 0) in training", "COL")
    groups: str = _option("", ROWS, "no group of this column lies in two parts", "COL")
    time: str = _option("", ROWS, "train on the earliest rows, test on the latest", "COL")
    balance: bool = _option(False, ROWS, "every class weighs the same in training")


@dataclass(frozen=True)
class SearchOptions(Options):
    """What a search does, where its trials run, and where records are kept.

    A field of the same name in `config.StudyConfig` is handed on as it is; None and "" stand for what the help says.
    """

    split: str | None = _option(None, DATA, "fractions of train, validation, test, e.g. 0.7,0.2,0.1", "A,B,C")
    max_rows: int | None = _option(None, DATA, "use a seeded sample of at most N rows", "N", positive_int)
    models: tuple[str, ...] = _option(("bishop",), SEARCH, "models to search, or all (bishop)", "NAME")
    space: str | None = _option(None, SEARCH, "search space; default: the model's own", "NAME|FILE")
    trials: int | None = _option(
        None, SEARCH, "trials per dataset (20, 10 x models; budget: no limit)", "N", positive_int
    )
    time_budget: float | None = _option(None, SEARCH, "for the whole command, e.g. 30m", "T", duration)
    trial_time_limit: float | None = _option(
        None, SEARCH, "a trial stops after that; one that hangs has failed", "T", duration
    )
    max_epochs: int | None = _option(None, SEARCH, "epochs per trial (200; small space: 30)", "N", positive_int)
    sampler: str = _option("tpe", SEARCH, "Optuna sampler (tpe)", choices=("tpe", "random", "gp"))
    scheduler: str = _option("asha", SEARCH, "early stopping of trials (asha)", choices=("asha", "none"))
    metric: str | None = _option(
        None, SEARCH, "selects (auc for single tables, accuracy for suites, r2 for regression)", "NAME"
    )
    seed: int = _option(0, SEARCH, "seed of split and search (0)", "N", non_negative_int)
    eval_seeds: int | None = _option(None, SEARCH, "trainings of the winner for the test score (3)", "N", positive_int)
    precision: str = _option(
        "auto", SEARCH, "of networks in training; auto: bf16 where the processor has it and it is faster",
        choices=("auto", "fp32", "bf16"), training=True,
    )  # fmt: skip
    warm_start: str = _option(
        "none", SEARCH, "try early what was best elsewhere: the authors' configurations, or your studies of similar "
        "tables (none)", choices=("none", "paper", "mlflow"),
    )  # fmt: skip
    doctor: bool = _option(True, SEARCH, "do not look for leaks, repeated rows and ids first")
    refit: bool = _option(False, SEARCH, "register the winner trained on train and validation rows together")
    ray_address: str = _option("", PLACE, "cluster to join (RAY_ADDRESS); default: own Ray", "A")
    max_concurrent: int | None = _option(None, PLACE, "trials at a time (as many as fit)", "N", positive_int)
    cpus_per_trial: float | None = _option(None, PLACE, "CPUs of each worker (1)", "X", positive_float)
    gpus_per_trial: float | None = _option(
        None, PLACE, "GPUs of each worker, fractions allowed (by predicted memory)", "X", non_negative_float
    )
    workers_per_trial: int = _option(1, PLACE, "data-parallel workers (1)", "N", positive_int)
    trainer: str = _option(
        "auto", PLACE, "auto: Ray Train for several workers or whole GPUs, else the trial's own process",
        choices=("auto", "ray", "inprocess"),
    )  # fmt: skip
    storage: str = _option("", RECORDS, "studies and checkpoints, shared by all nodes (BISHOP_RAY_HOME)", "DIR")
    study_db: str = _option("", RECORDS, "keep the record of trials in this database, not in --storage", "URL")
    tracking_uri: str = _option("", RECORDS, "MLflow address (MLFLOW_TRACKING_URI)", "URI")
    fresh: bool = _option(False, RECORDS, "start the studies over")

    def deadline(self) -> float:
        """When a search that begins now must have ended: Unix time, 0 for none."""
        return time.time() + self.time_budget if self.time_budget else 0.0
