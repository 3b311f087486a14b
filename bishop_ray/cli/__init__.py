"""Command-line basics shared by the jobs: parser, running of a command, exit codes.

Nothing heavy is imported here: ``--help`` and the lists answer at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from bishop_ray.cli.flags import add_group, data_flags, place_flags
from bishop_ray.cli.flags import non_negative_int as non_negative_int
from bishop_ray.cli.flags import positive_float as positive_float
from bishop_ray.cli.flags import positive_int as positive_int
from bishop_ray.errors import UserError
from bishop_ray.redact import redacted, show_fault
from bishop_ray.search.options import SEARCH
from bishop_ray.signals import catch_signals

if TYPE_CHECKING:
    from bishop_ray.search.cluster import Cluster


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
        print(f"error: {redacted(error)}", file=sys.stderr)
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


def tune_parser() -> argparse.ArgumentParser:
    """The parser of ``jobs/tune.py``."""
    parser = Parser(
        prog="tune.py",
        allow_abbrev=False,
        description="Searches hyperparameters on a table or an OpenML suite, evaluates the winner once on the test "
        "split, and registers it in MLflow. The same command again continues, or says that it is finished.",
    )
    data_flags(parser)
    add_group(parser, SEARCH)
    place_flags(parser)
    lists = parser.add_argument_group("information (nothing is trained)")
    lists.add_argument(
        "--dry-run", action="store_true", help="print shapes, predicted cost, spaces, resources, trial counts"
    )
    for what in ("datasets", "models", "metrics", "spaces"):
        lists.add_argument(f"--list-{what}", action="store_true", help=f"print the known {what}")
    return parser


def check_output(output: str, flag: str = "--output") -> None:
    """Nothing, if the file of ``--output`` or another `flag` can be written.

    Raises:
        UserError: It names a folder, or lies in none.
    """
    if output and (Path(output).is_dir() or not Path(output).absolute().parent.is_dir()):
        raise UserError(f"{flag}: expected a file in an existing folder; found {output!r}")


def connect_cluster(address: str) -> Cluster:
    """Joins the cluster of ``--ray-address``, or starts Ray in this process."""
    from bishop_ray.search.cluster import connect

    cluster = connect(address)
    catch_signals()  # Ray has put its own handlers in place
    return cluster


def quiet() -> None:
    """Keeps library noise out of the output; errors still show."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    for name in ("mlflow", "alembic", "openml", "optuna", "ray"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # a failed trial has its own line, with its reason
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it raises what it logs
    # Our own notes (columns dropped, rows without target) belong to the output.
    notes = logging.StreamHandler(sys.stdout)
    notes.setFormatter(logging.Formatter("note: %(message)s"))
    own = logging.getLogger("bishop_ray")
    own.handlers, own.propagate = [notes], False
    own.setLevel(logging.INFO)
