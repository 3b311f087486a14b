"""The jobs ``jobs/serve.py`` and ``jobs/predict.py``: flags, and what they print.

Nothing heavy is imported before it is needed: ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from bishop_ray import cli
from bishop_ray.cli import quiet
from bishop_ray.data.refs import TABLE_SUFFIXES
from bishop_ray.errors import UserError
from bishop_ray.signals import catch_signals

if TYPE_CHECKING:
    from bishop_ray.predictor import Predictor


OUTPUTS = (".csv", ".parquet")


def serve_parser() -> argparse.ArgumentParser:
    """The parser of ``jobs/serve.py``."""
    parser = cli.Parser(
        prog="serve.py",
        allow_abbrev=False,
        description="Serves a registered model over HTTP with Ray Serve. The same command while it runs puts the "
        "model's present version in the place of the one that answers, without a failed request. The bearer token "
        "comes from BISHOP_SERVE_TOKEN; without it one is made and printed.",
    )
    parser.add_argument("name", metavar="NAME", help="registered model, e.g. CR-abalone")
    version_flags(parser)
    parser.add_argument("--host", default="", metavar="ADDRESS", help="listen here (127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=_port, metavar="N", help="port; 0: a free one (8000)")
    parser.add_argument("--replicas", type=cli.positive_int, default=1, metavar="N", help="processes that answer (1)")
    parser.add_argument(
        "--max-body", type=cli.positive_float, default=10.0, metavar="MB", help="largest request, in megabytes (10)"
    )
    parser.add_argument(
        "--ray-address", default="", metavar="A", help="cluster to join (RAY_ADDRESS); default: own Ray"
    )
    return parser


def predict_parser() -> argparse.ArgumentParser:
    """The parser of ``jobs/predict.py``."""
    parser = cli.Parser(
        prog="predict.py",
        allow_abbrev=False,
        description="Predicts the rows of a file with a registered model: prediction and, for classes, a probability "
        "per label. The file may be larger than memory.",
    )
    parser.add_argument("name", metavar="NAME", help="registered model, or with --folder a saved predictor's folder")
    parser.add_argument("file", metavar="FILE", help=f"rows: {', '.join(TABLE_SUFFIXES)}")
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help="written here: .csv or .parquet")
    version_flags(parser)
    parser.add_argument("--folder", action="store_true", help="NAME is a folder that Predictor.save wrote")
    parser.add_argument(
        "--batch-rows", type=cli.positive_int, default=10_000, metavar="N", help="rows in memory at a time (10000)"
    )
    parser.add_argument("--keep", nargs="+", default=[], metavar="COLUMN", help="columns of FILE to hand on")
    return parser


def run_serve(args: argparse.Namespace) -> int:
    """The job; returns the exit code.

    Raises:
        UserError: Bad input, or the service cannot be started.
    """
    quiet()
    try:
        from bishop_ray.serving.service import ServeOptions, serve_model
    except ModuleNotFoundError as error:
        raise UserError(f"serving needs {error.name}: pip install 'bishop-ray[serve]'") from error
    wish = ServeOptions(
        args.name,
        str(args.version or args.alias),
        args.tracking_uri,
        args.host,
        args.port,
        args.replicas,
        int(args.max_body * 1_000_000),
        args.ray_address or os.environ.get("RAY_ADDRESS", ""),
    )
    serve_model(wish, lambda line: print(line, flush=True), catch_signals)
    return 0


def run_predict(args: argparse.Namespace) -> int:
    """The job; returns the exit code.

    Raises:
        UserError: Bad input; nothing was written.
    """
    quiet()
    file, output = Path(args.file).expanduser(), Path(args.output).expanduser()
    check_rows_file(file)
    _check_output(file, output)
    predictor = named_predictor(args)
    from bishop_ray.serving.batch_predict import predict_file

    rows = predict_file(predictor, file, output, args.batch_rows, list(dict.fromkeys(args.keep)))
    print(f"{rows} rows: {output}")
    return 0


def named_predictor(args: argparse.Namespace) -> Predictor:
    """The model of ``NAME`` and the flags of `version_flags`, or of a folder with ``--folder``.

    Raises:
        UserError: There is none, or flags do not fit together.
    """
    if args.folder:
        if args.version or args.alias != "champion" or args.tracking_uri:
            raise UserError("--folder: expected no --alias, --version or --tracking-uri beside it; found one")
        from bishop_ray.predictor import Predictor

        return Predictor.load(Path(args.name).expanduser())
    from bishop_ray.registry import load_best

    return load_best(args.name, str(args.version or args.alias), args.tracking_uri)


def check_rows_file(file: Path) -> None:
    """Nothing, if `file` can hold rows.

    Raises:
        UserError: It is none, or has another suffix.
    """
    if not file.name.lower().endswith(TABLE_SUFFIXES):
        raise UserError(f"{file}: expected a file ending in {', '.join(TABLE_SUFFIXES)}; found {file.name!r}")
    if not file.is_file():
        raise UserError(f"{file}: expected a table file; found {'a folder' if file.is_dir() else 'no such file'}")


def _check_output(file: Path, output: Path) -> None:
    if not output.name.lower().endswith(OUTPUTS):
        raise UserError(f"--output: expected a file ending in {' or '.join(OUTPUTS)}; found {str(output)!r}")
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise UserError(f"--output: expected a file in an existing folder; found {str(output)!r}")
    if output.exists() and output.samefile(file):
        raise UserError(f"--output: expected another file than the one that is read; found {str(output)!r}")


def version_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what says which version of a registered model is meant, and where it is registered."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--alias", default="champion", metavar="NAME", help="champion, or a model's name (champion)")
    group.add_argument("--version", type=cli.positive_int, metavar="N", help="this version, whatever its aliases")
    parser.add_argument("--tracking-uri", default="", metavar="URI", help="MLflow address (MLFLOW_TRACKING_URI)")


def _port(text: str) -> int:
    port = cli.non_negative_int(text)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"expected a port up to 65535; found {text!r}")
    return port
