"""``jobs/models.py explain``: its flags, and what it prints of a model's explanation.

Nothing heavy is imported before it is needed: ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from bishop_ray import cli
from bishop_ray.cli import quiet
from bishop_ray.cli.serve import check_rows_file, named_predictor, version_flags
from bishop_ray.data.refs import TABLE_SUFFIXES
from bishop_ray.errors import BadTable, UserError

if TYPE_CHECKING:
    import pandas as pd

    from bishop_ray.predictor import Explanation, Predictor

    Actions = argparse._SubParsersAction[cli.Parser]


def add_explain(actions: Actions) -> None:
    """Adds the action to the parser of ``jobs/models.py``."""
    text = (
        "Shows which columns a registered model's predictions depend on: every column's values are exchanged among the "
        "rows of FILE, and what that does is measured. Of BiSHop also its sparse attention, which is no importance. "
        "FILE has to fit into memory."
    )
    explain = actions.add_parser("explain", allow_abbrev=False, help="what predictions depend on", description=text)
    explain.add_argument("name", metavar="NAME", help="registered model, or with --folder a saved predictor's folder")
    explain.add_argument("file", metavar="FILE", help=f"rows: {', '.join(TABLE_SUFFIXES)}")
    version_flags(explain)
    explain.add_argument("--folder", action="store_true", help="NAME is a folder that Predictor.save wrote")
    explain.add_argument("--target", default="", metavar="COL", help="column of targets; rows without one are left out")
    explain.add_argument(
        "--metric", default="", metavar="NAME", help="judges, with --target (the one that selected the model)"
    )
    explain.add_argument("--repeats", type=cli.positive_int, default=5, metavar="N", help="exchanges per column (5)")
    explain.add_argument(
        "--max-rows", type=cli.positive_int, default=2000, metavar="N", help="of more rows a random sample (2000)"
    )
    explain.add_argument(
        "--seed", type=cli.non_negative_int, default=0, metavar="N", help="of sample and exchanges (0)"
    )
    explain.add_argument("--output", default="", metavar="CSV", help="also write the table here")


def run_explain(args: argparse.Namespace) -> int:
    """The action; returns the exit code.

    Raises:
        UserError: Bad input; nothing was written.
    """
    quiet()
    file, output = Path(args.file).expanduser(), Path(args.output).expanduser() if args.output else None
    check_rows_file(file)
    if output is not None:
        _check_output(file, output)
    predictor = named_predictor(args)
    frame, target = _read(predictor, file, args.target)
    try:
        found = predictor.explain(
            frame, target, metric=args.metric, repeats=args.repeats, max_rows=args.max_rows, seed=args.seed
        )
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    table = _table(found)
    print(f"{predictor.model_name}, {found.rows} of {len(frame)} rows, {found.repeats} exchanges of each column")
    print(f"importance: mean {found.measure}\n\n{_words(table)}")
    if output is not None:
        from bishop_ray.paths import write_whole

        write_whole(output, table.to_csv(index=False, lineterminator="\n"))
        print(f"\nsaved: {output}")
    return 0


def _check_output(file: Path, output: Path) -> None:
    wanted = "--output: expected a .csv file in an existing folder"
    if output.suffix.lower() != ".csv" or output.is_dir() or not output.absolute().parent.is_dir():
        raise UserError(f"{wanted}; found {str(output)!r}")
    if output.exists() and output.samefile(file):
        raise UserError(f"{wanted}, another one than is read; found {str(output)!r}")


def _read(predictor: Predictor, file: Path, target: str) -> tuple[pd.DataFrame, pd.Series | None]:
    """The rows as the model reads them, and their targets if a column is named; those without one are left out."""
    import pandas as pd

    from bishop_ray.data.files import read_chunks, target_values
    from bishop_ray.predictor import label_texts

    keep = [target] if target else []
    try:
        batches = list(read_chunks(file, 100_000, predictor.schema, predictor.levels, keep))
    except BadTable as error:  # the target is handed on as other jobs hand on columns to keep
        text = str(error)
        raise BadTable(text.replace("--keep:", "--target:", 1) if text.startswith("--keep:") else text) from None
    frame = pd.concat([batch.frame for batch in batches], ignore_index=True)
    if not target:
        return frame, None
    labels = frozenset(label_texts(predictor))
    parts = [target_values(file, batch.kept.column(target).to_pandas(), labels) for batch in batches]
    values = pd.concat(parts, ignore_index=True)
    known = values.notna()
    if len(values) and not known.any():
        raise BadTable(f"--target: {file}: expected rows with a value of the target {target!r}; found none")
    return frame[known].reset_index(drop=True), values[known].reset_index(drop=True)


def _table(found: Explanation) -> pd.DataFrame:
    """A row per column: feature, importance, sd; with attention its weight and the network's inputs."""
    if found.attention is None:
        return found.importances
    renamed = found.attention.rename(columns={"weight": "attention"})
    return found.importances.merge(renamed, on="feature", how="left", validate="one_to_one")


def _words(table: pd.DataFrame) -> str:
    from bishop_ray.search.leaderboard import columns

    rows = [tuple(table.columns)]
    for row in table.itertuples(index=False):
        rows.append(tuple(value if isinstance(value, str) else _number(value) for value in row))
    return columns(rows)


def _number(value: float) -> str:
    return str(value) if float(value).is_integer() and not isinstance(value, float) else f"{value:.4f}"
