"""Command-line flags by group and their value types. Imports nothing heavy."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable


def positive_int(text: str) -> int:
    """A whole number >= 1."""
    if not re.fullmatch(r"[0-9]+", text.strip()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1; found {text!r}")
    return int(text)


def positive_float(text: str) -> float:
    """A number > 0."""
    return _number(text, "> 0", lambda value: value > 0)


def _number(text: str, wanted: str, fits: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not fits(value):
        raise argparse.ArgumentTypeError(f"expected a number {wanted}; found {text!r}")
    return value


def non_negative_float(text: str) -> float:
    """A number >= 0."""
    return _number(text, ">= 0", lambda value: value >= 0)


def non_negative_int(text: str) -> int:
    """A whole number >= 0."""
    if not re.fullmatch(r"[0-9]+", text.strip()):
        raise argparse.ArgumentTypeError(f"expected a whole number >= 0; found {text!r}")
    return int(text)


def duration(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``30m``, ``1.5h`` or ``1h30m``."""
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    parts = re.findall(r"(\d+(?:\.\d+)?)([hms])", text.strip())
    if "".join(n + u for n, u in parts) == text.strip() and parts:
        seconds = sum(float(n) * units[u] for n, u in parts)
    else:
        seconds = float(text) if re.fullmatch(r"\d+(?:\.\d+)?", text.strip()) else 0.0
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"expected a duration such as 90s, 30m or 1h30m; found {text!r}")
    return seconds


def data_flags(parser: argparse.ArgumentParser) -> None:
    """Which dataset, and how it is split."""
    group = parser.add_argument_group("data (one of --suite, --task, --table, --dataset)")
    group.add_argument("--suite", metavar="NAME", help="CC, NC, CR, NR (OpenML 334, 337, 335, 336) or any suite id")
    group.add_argument("--paper-tasks", action="store_true", help="only the paper's own tasks of the suite")
    group.add_argument("--task", nargs="+", metavar="ID", help="OpenML task ids")
    group.add_argument("--table", metavar="FILE", help="a .csv, .tsv or .parquet file")
    group.add_argument("--target", metavar="COLUMN", help="target column of --table")
    group.add_argument("--task-type", metavar="TYPE", help="regression or classification; inferred when not given")
    group.add_argument("--dataset", nargs="+", metavar="NAME", help="tables by name: --list-datasets shows them")
    group.add_argument("--data-dir", default="", metavar="DIR", help="files of the paper's tables (BISHOP_DATA_DIR)")
    group.add_argument("--split", metavar="A,B,C", help="fractions of train, validation, test, e.g. 0.7,0.2,0.1")
    group.add_argument("--max-rows", type=positive_int, metavar="N", help="use a seeded sample of at most N rows")
    group.add_argument("--openml-server", default="", metavar="URL", help="OpenML address (or BISHOP_OPENML_SERVER)")
    row_flags(parser)


def row_flags(parser: argparse.ArgumentParser) -> None:
    """What rows weigh, and which of them stay together."""
    group = parser.add_argument_group("rows")
    group.add_argument("--weights", default="", metavar="COL", help="column of row weights (>= 0) in training")
    group.add_argument("--groups", default="", metavar="COL", help="no group of this column lies in two parts")
    group.add_argument("--time", default="", metavar="COL", help="train on the earliest rows, test on the latest")
    group.add_argument("--balance", action="store_true", help="every class weighs the same in training")


def search_flags(parser: argparse.ArgumentParser) -> None:
    """What a search does."""
    group = parser.add_argument_group("search")
    group.add_argument(
        "--models", nargs="+", default=["bishop"], metavar="NAME", help="models to search, or all (bishop)"
    )
    group.add_argument("--space", metavar="NAME|FILE", help="search space; default: the model's own")
    group.add_argument(
        "--trials", type=positive_int, metavar="N", help="trials per dataset (20, 10 x models; budget: no limit)"
    )
    group.add_argument("--time-budget", type=duration, metavar="T", help="for the whole command, e.g. 30m")
    group.add_argument(
        "--trial-time-limit", type=duration, metavar="T", help="a trial stops after that; one that hangs has failed"
    )
    group.add_argument("--max-epochs", type=positive_int, metavar="N", help="epochs per trial (200; small space: 30)")
    group.add_argument("--sampler", choices=("tpe", "random", "gp"), default="tpe", help="Optuna sampler (tpe)")
    group.add_argument("--scheduler", choices=("asha", "none"), default="asha", help="early stopping of trials (asha)")
    group.add_argument(
        "--metric", metavar="NAME", help="selects (auc for single tables, accuracy for suites, r2 for regression)"
    )
    group.add_argument("--seed", type=non_negative_int, default=0, metavar="N", help="seed of split and search (0)")
    group.add_argument(
        "--eval-seeds", type=positive_int, metavar="N", help="trainings of the winner for the test score (3)"
    )
    group.add_argument(
        "--precision", choices=("auto", "fp32", "bf16"), default="auto",
        help="of networks in training; auto: bf16 where the processor has it and it is faster",
    )  # fmt: skip
    group.add_argument(
        "--warm-start", choices=("none", "paper", "mlflow"), default="none",
        help="try early what was best elsewhere: the authors' configurations, or your studies of similar tables (none)",
    )  # fmt: skip
    group.add_argument("--no-doctor", action="store_true", help="do not look for leaks, repeated rows and ids first")
    group.add_argument(
        "--refit", action="store_true", help="register the winner trained on train and validation rows together"
    )


def cluster_flags(parser: argparse.ArgumentParser) -> None:
    """Where trainings run."""
    group = parser.add_argument_group("where trials run")
    group.add_argument("--ray-address", default="", metavar="A", help="cluster to join (RAY_ADDRESS); default: own Ray")
    group.add_argument("--max-concurrent", type=positive_int, metavar="N", help="trials at a time (as many as fit)")
    group.add_argument("--cpus-per-trial", type=positive_float, metavar="X", help="CPUs of each worker (1)")
    group.add_argument(
        "--gpus-per-trial",
        type=non_negative_float,
        metavar="X",
        help="GPUs of each worker, fractions allowed (by predicted memory)",
    )
    group.add_argument(
        "--workers-per-trial", type=positive_int, default=1, metavar="N", help="data-parallel workers (1)"
    )
    group.add_argument(
        "--trainer", choices=("auto", "ray", "inprocess"), default="auto",
        help="auto: Ray Train for several workers or whole GPUs, else the trial's own process",
    )  # fmt: skip


def record_flags(parser: argparse.ArgumentParser) -> None:
    """Where records are kept."""
    group = parser.add_argument_group("records")
    group.add_argument(
        "--storage", default="", metavar="DIR", help="studies and checkpoints, shared by all nodes (BISHOP_RAY_HOME)"
    )
    group.add_argument(
        "--study-db", default="", metavar="URL", help="keep the record of trials in this database, not in --storage"
    )
    group.add_argument("--tracking-uri", default="", metavar="URI", help="MLflow address (MLFLOW_TRACKING_URI)")
    group.add_argument("--fresh", action="store_true", help="start the studies over")
    group.add_argument("--output", default="", metavar="FILE.csv", help="also write the leaderboard here")
