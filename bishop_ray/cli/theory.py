"""The job ``jobs/theory.py``: its flags, what it does with them, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bishop_ray import cli
from bishop_ray.cli.flags import non_negative_float, non_negative_int, positive_float, positive_int
from bishop_ray.errors import UserError
from bishop_ray.paths import write_whole
from bishop_ray.search.leaderboard import rows_csv, rows_text

if TYPE_CHECKING:
    from bishop_ray.paper.retrieval import RetrievalRow


TITLES = {
    "energy": "Energy: share of updates at which it rises; here (1/beta before Psi*), and in the two printed forms",
    "errors": "Retrieval error after one update: how often sparse ends farther from a memory than dense",
    "iterations": "Updates until the state stands still: sparse and dense, how often sparse needs more",
    "noise": "Noise: distance of the retrieved state from the clean pattern; how often it is larger than dense",
    "noise_fits": "How straight the noise curves are: R2 of a line, and of an exponential",
}
"""File name -> what stands in it."""


def theory_parser() -> argparse.ArgumentParser:
    """The parser of ``jobs/theory.py``."""
    parser = cli.Parser(
        prog="theory.py",
        allow_abbrev=False,
        description="Measures on random patterns what the paper's theory of memory retrieval says: the falling energy, "
        "and how often the sparse model's smaller error, fewer updates and robustness to noise are violated.",
    )
    whole, positive = positive_int, positive_float
    parser.add_argument(
        "--patterns",
        nargs="+",
        type=whole,
        default=[8, 64],
        metavar="M",
        help="stored patterns, one or more sizes (8 64)",
    )
    parser.add_argument("--dim", type=whole, default=16, metavar="D", help="width of the patterns (16)")
    parser.add_argument("--draws", type=whole, default=500, metavar="N", help="random memories and queries (500)")
    parser.add_argument(
        "--betas", nargs="+", type=positive, default=[0.1, 1.0, 10.0, 100.0], metavar="B",
        help="inverse temperatures (0.1 1 10 100)",
    )  # fmt: skip
    parser.add_argument(
        "--noise", type=non_negative_float, default=1.0, metavar="X",
        help="length of the noise in queries; patterns have length 1 (1)",
    )  # fmt: skip
    parser.add_argument("--seed", type=non_negative_int, default=0, metavar="N", help="of the draws (0)")
    parser.add_argument("--output", default="", metavar="DIR", help="also write each table as CSV there")
    return parser


def run_theory(args: argparse.Namespace) -> int:
    """Prints the tables and writes their CSV files; returns the exit code.

    Raises:
        UserError: ``--output`` is no folder.
    """
    folder = Path(args.output) if args.output else None
    if folder is not None and folder.exists() and not folder.is_dir():
        raise UserError(f"--output: expected a folder; found the file {args.output!r}")
    tables = theory_tables(args)
    for name, rows in tables.items():
        print(f"{TITLES[name]}\n{rows_text(rows)}\n")
    if folder is not None:
        try:
            for name, rows in tables.items():
                write_whole(folder / f"{name}.csv", rows_csv(rows))
        except OSError as error:
            raise UserError(f"--output: cannot write to {args.output!r}: {error.strerror or error}") from None
        print(f"tables: {folder}")
    return 0


def theory_tables(args: argparse.Namespace) -> dict[str, list[RetrievalRow]]:
    """The tables of `TITLES`, by name; each row begins with the number of patterns."""
    from bishop_ray.paper import retrieval

    tables: dict[str, list[RetrievalRow]] = {name: [] for name in TITLES}
    on_draws: dict[str, Callable[..., list[RetrievalRow]]] = {
        "energy": retrieval.energy_rows,
        "errors": retrieval.error_rows,
        "iterations": retrieval.iteration_rows,
    }
    for patterns in dict.fromkeys(args.patterns):
        draws = retrieval.Draws.random(args.draws, patterns, args.dim, args.noise, args.seed)
        found = {name: measure(draws, betas=args.betas) for name, measure in on_draws.items()}
        found["noise"] = [
            row for beta in args.betas for row in retrieval.noise_rows(args.draws, patterns, args.dim, beta, args.seed)
        ]
        found["noise_fits"] = retrieval.fit_rows(found["noise"])
        for name, rows in found.items():
            tables[name] += [{"patterns": patterns, **row} for row in rows]
    return tables
