"""Flags shared by the jobs, and the one place where a user's mistake becomes a line and exit code 2.

Nothing heavy is imported here: ``--help`` and the lists answer at once.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from bishop_ray.addresses import show_fault, told
from bishop_ray.errors import UnknownName, UserError

EXIT_FAILED, EXIT_USER, EXIT_INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line like all others."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and ends with exit code 2."""
        raise UserError(f"{message} (see {self.prog} --help)")


def run(main: Callable[[], int]) -> NoReturn:
    """Ends the process with `main`'s exit code; a `UserError` is one line on standard error and exit code 2."""
    catch_signals()
    sys.excepthook = show_fault
    try:
        code = main()
    except UserError as error:
        print(f"error: {told(error)}", file=sys.stderr)
        code = EXIT_USER
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where this one was", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) went away: not an error of ours. Python would complain at exit without this.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_FAILED
    sys.stdout.flush()
    sys.exit(code)


def catch_signals() -> None:
    """Makes SIGTERM end a command as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    # One way out for Ctrl-C and SIGTERM: runs are closed and slots given back on the way.
    raise KeyboardInterrupt


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


def tune_parser() -> argparse.ArgumentParser:
    """The parser of ``jobs/tune.py``."""
    parser = Parser(
        prog="tune.py",
        allow_abbrev=False,
        description="Searches hyperparameters on a table or an OpenML suite, evaluates the winner once on the test "
        "split, and registers it in MLflow. The same command again continues, or says that it is finished.",
    )
    _data_flags(parser)
    _search_flags(parser)
    _cluster_flags(parser)
    _record_flags(parser)
    lists = parser.add_argument_group("information (nothing is trained)")
    lists.add_argument(
        "--dry-run", action="store_true", help="print shapes, predicted cost, spaces, resources, trial counts"
    )
    for what in ("datasets", "models", "metrics", "spaces"):
        lists.add_argument(f"--list-{what}", action="store_true", help=f"print the known {what}")
    return parser


def _data_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data (one of --suite, --task, --table, --dataset)")
    group.add_argument("--suite", metavar="NAME", help="CC, NC, CR, NR (OpenML 334, 337, 335, 336) or any suite id")
    group.add_argument("--paper-tasks", action="store_true", help="only the paper's own tasks of the suite")
    group.add_argument("--task", nargs="+", metavar="ID", help="OpenML task ids")
    group.add_argument("--table", metavar="FILE", help="a .csv, .tsv or .parquet file")
    group.add_argument("--target", metavar="COLUMN", help="target column of --table")
    group.add_argument("--task-type", metavar="TYPE", help="regression or classification; inferred when not given")
    group.add_argument("--dataset", metavar="NAME", help="a table that scikit-learn ships, e.g. breast_cancer")
    group.add_argument("--split", metavar="A,B,C", help="fractions of train, validation, test, e.g. 0.7,0.2,0.1")
    group.add_argument("--max-rows", type=positive_int, metavar="N", help="use a seeded sample of at most N rows")
    group.add_argument("--openml-server", default="", metavar="URL", help="OpenML address (or BISHOP_OPENML_SERVER)")


def _search_flags(parser: argparse.ArgumentParser) -> None:
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
        "--refit", action="store_true", help="register the winner trained on train and validation rows together"
    )


def _cluster_flags(parser: argparse.ArgumentParser) -> None:
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


def _record_flags(parser: argparse.ArgumentParser) -> None:
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


def fractions(text: str) -> tuple[float, float, float]:
    """Three fractions that sum to one.

    Raises:
        UserError: Not three positive numbers with sum 1.
    """
    try:
        parts = tuple(float(part) for part in text.split(","))
    except ValueError:
        parts = ()
    if len(parts) != 3 or min(parts) <= 0 or abs(sum(parts) - 1) > 1e-6:
        raise UserError(f"--split: expected three positive fractions that sum to 1, e.g. 0.7,0.2,0.1; found {text!r}")
    return parts[0], parts[1], parts[2]


def one_source(args: argparse.Namespace) -> str:
    """Which data flag was given.

    Raises:
        UserError: None, several, or one without its companions.
    """
    given = [name for name in ("suite", "task", "table", "dataset") if getattr(args, name) is not None]
    if len(given) != 1:
        found = " and ".join(f"--{name}" for name in given) or "none of them"
        raise UserError(f"expected one of --suite, --task, --table, --dataset; found {found}")
    for flag, needs in (("target", "table"), ("task_type", "table")):
        if getattr(args, flag) is not None and given[0] != needs:
            raise UserError(f"--{flag.replace('_', '-')} goes with --{needs}; found --{given[0]}")
    if args.paper_tasks and given[0] != "suite":
        raise UserError(f"--paper-tasks goes with --suite; found --{given[0]}")
    return given[0]


def known(kind: str, names: list[str], registry: Any) -> list[str]:
    """`names` (also comma-separated), each one in the registry, without repeats.

    Raises:
        UnknownName: One is not.
        UserError: None is left.
    """
    split = [part for name in names for part in name.split(",") if part]
    if not split:
        raise UserError(f"--{kind}s: expected at least one of {', '.join(registry)}; found {' '.join(names)!r}")
    for name in split:
        if name not in registry:
            raise UnknownName(kind, name, registry)
    return list(dict.fromkeys(split))
