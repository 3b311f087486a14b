"""What the jobs share: a parser, and the one place where a user's mistake becomes a line and exit code 2.

Nothing heavy is imported here: ``--help`` and the lists answer at once.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from bishop_ray.addresses import show_fault, told
from bishop_ray.errors import UnknownName, UserError
from bishop_ray.flags import cluster_flags, data_flags, record_flags, search_flags
from bishop_ray.flags import non_negative_int as non_negative_int
from bishop_ray.flags import positive_float as positive_float
from bishop_ray.flags import positive_int as positive_int

EXIT_FAILED, EXIT_USER, EXIT_INTERRUPTED = 1, 2, 130


class Parser(argparse.ArgumentParser):
    """argparse whose errors are one line like all others."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and ends with exit code 2."""
        raise UserError(f"{message} (see {self.prog} --help)")


GOES_ON = "the same command goes on where this one was"


def run(main: Callable[[], int], interrupted: str = GOES_ON) -> NoReturn:
    """Ends the process with `main`'s exit code; a `UserError` is one line on standard error and exit code 2.

    Args:
        main: The job.
        interrupted: What Ctrl-C means for it, in a few words.
    """
    catch_signals()
    sys.excepthook = show_fault
    try:
        code = main()
    except UserError as error:
        print(f"error: {told(error)}", file=sys.stderr)
        code = EXIT_USER
    except KeyboardInterrupt:
        print(f"interrupted; {interrupted}", file=sys.stderr)
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


def tune_parser() -> argparse.ArgumentParser:
    """The parser of ``jobs/tune.py``."""
    parser = Parser(
        prog="tune.py",
        allow_abbrev=False,
        description="Searches hyperparameters on a table or an OpenML suite, evaluates the winner once on the test "
        "split, and registers it in MLflow. The same command again continues, or says that it is finished.",
    )
    data_flags(parser)
    search_flags(parser)
    cluster_flags(parser)
    record_flags(parser)
    lists = parser.add_argument_group("information (nothing is trained)")
    lists.add_argument(
        "--dry-run", action="store_true", help="print shapes, predicted cost, spaces, resources, trial counts"
    )
    for what in ("datasets", "models", "metrics", "spaces"):
        lists.add_argument(f"--list-{what}", action="store_true", help=f"print the known {what}")
    return parser


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
    for flag, needs in (("target", "table"), ("task_type", "table"), ("data_dir", "dataset")):
        if getattr(args, flag) not in (None, "") and given[0] != needs:
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
