"""What every model reaches with its default configuration, against a linear model on the same rows.

    python jobs/bench/defaults.py --table shrutime.parquet --target Exited --table abalone.parquet --target rings
    python jobs/bench/defaults.py --folder DATA --names shrutime,jannis,cr_361288_abalone

The default configuration of a model is the first point of its search space. It is trained once as a trial trains it,
on one thread, and scored on the test rows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.append(sys.path.pop(0))  # last: an entmax.py lies in this folder, which is not the package
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from bishop_ray import cli
from bishop_ray.config import Params
from bishop_ray.data.refs import DatasetRef, embedded_ref, file_ref
from bishop_ray.data.split import DATASETS_I, split_dataset
from bishop_ray.data.table import RawDataset, Split
from bishop_ray.errors import BadTable, TrainingFailed, UnknownName, UserError
from bishop_ray.models import MODELS, model_class

BAR = 0.5
"""Points (hundredths of the metric) that a default configuration may stay behind the linear model."""


@dataclass(frozen=True)
class Line:
    """What one model reached on one table; scores in hundredths of the metric."""

    model: str
    validation: float
    test: float
    linear: float
    seconds: float

    def text(self) -> str:
        """A row of the Markdown table."""
        gap = self.test - self.linear
        verdict = "" if gap >= -BAR else " below the bar"
        return (
            f"| {self.model} | {self.validation:.2f} | {self.test:.2f} | {self.linear:.2f} | "
            f"{gap:+.2f}{verdict} | {self.seconds:.1f} |"
        )


def references(args: argparse.Namespace) -> list[DatasetRef]:
    """The tables that were asked for.

    Raises:
        UserError: Tables and targets do not pair up, no table is named, or the manifest lacks a name.
    """
    if len(args.table) != len(args.target):
        raise UserError(f"expected one --target per --table; found {len(args.target)} for {len(args.table)}")
    found = [file_ref(path, target) for path, target in zip(args.table, args.target, strict=True)]
    found += [embedded_ref(name) for name in args.dataset]
    if args.folder:
        manifest = Path(args.folder) / "manifest.json"
        if not manifest.is_file():
            raise BadTable(f"--folder: expected {manifest} with names, files and targets; found no such file")
        entries = {Path(e["file"]).stem: e for e in json.loads(manifest.read_text("utf-8"))["datasets"]}
        for name in args.names.split(","):
            if name not in entries:
                raise UnknownName("table of the manifest", name, entries)
            entry = entries[name]
            kind = "regression" if entry["task_type"] == "regression" else "classification"
            found.append(file_ref(Path(args.folder) / entry["file"], entry["target"], kind))
    if not found:
        raise UserError("expected --table with --target, --dataset, or --folder with --names; found none")
    return found


def default_params(model: str, space: str) -> Params:
    """The first point of a model's space, constants included."""
    from bishop_ray.search.parameters import Range
    from bishop_ray.search.space import load_space, unflatten

    loaded = load_space(space, model)
    constants = {name: entry for name, entry in loaded.entries.items() if not isinstance(entry, Range)}
    return unflatten(constants | (loaded.first[0] if loaded.first else {}))


def measure(model: str, params: Params, parts: Split[RawDataset], args: argparse.Namespace) -> Line:
    """Trains on the training rows, selects on the validation rows, scores on the test rows.

    Raises:
        UserError: The model cannot do the table; the message says why.
        TrainingFailed: The training diverged.
    """
    from bishop_ray.config import TrialConfig
    from bishop_ray.data.preprocess import Preprocessor
    from bishop_ray.metrics import default_metric, evaluate
    from bishop_ray.predictor import Predictor
    from bishop_ray.training.baselines import reference_scores
    from bishop_ray.training.job import PREDICTOR, StudyData, train_here

    preprocessor = Preprocessor.fit(parts.train, model_class(model).numeric)
    tables, spec, scale = parts.map(preprocessor.transform), preprocessor.spec, preprocessor.target.scale
    if reason := model_class(model).cannot(spec, len(tables.train)):
        raise UserError(reason)
    metric = default_metric(spec.task, suite=False)
    data = StudyData(spec, tables.train, tables.validation, preprocessor.to_dict(), scale)
    job = TrialConfig.from_params(model, params, metric=metric, max_epochs=args.max_epochs, seed=args.seed)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        train_here(job, data, Path(folder) / "checkpoint", lambda report: False, Path(folder) / "saved")
        seconds = time.perf_counter() - began
        loaded = Predictor.load(Path(folder) / "saved" / PREDICTOR)
    validation, test = (
        evaluate(metric, spec.task, rows.y, loaded.model.predict(rows.x_num, rows.x_cat), scale=scale)
        for rows in (tables.validation, tables.test)
    )
    # The linear model reads filled numbers, whatever this model reads.
    filled = Preprocessor.fit(parts.train)
    plain = parts.map(filled.transform)
    linear = reference_scores(plain.train, plain.test, filled.spec, metric, scale=scale)["linear"]
    return Line(model, 100 * validation, 100 * test, 100 * linear, seconds)


def bench(ref: DatasetRef, models: list[str], args: argparse.Namespace) -> int:
    """Prints the table of one dataset; how many models stay below the bar or fail."""
    from bishop_ray.data.load import load_dataset
    from bishop_ray.metrics import default_metric

    raw = load_dataset(ref)
    parts = split_dataset(raw, args.seed, DATASETS_I.fractions, args.max_rows)
    sizes = "/".join(str(len(part)) for part in (parts.train, parts.validation, parts.test))
    metric = default_metric(raw.task, suite=False)
    print(f"\n{ref.name}: {raw.task.value}, {raw.frame.shape[1]} features, rows {sizes}, 100 x {metric}\n")
    print("| model | validation | test | linear | test - linear | fit, s |\n|---|---|---|---|---|---|", flush=True)
    bad = 0
    for model in models:
        try:
            line = measure(model, default_params(model, args.space.get(model, model)), parts, args)
        except UserError as error:
            print(f"| {model} | skipped: {error} | | | | |", flush=True)
            continue
        except TrainingFailed as error:
            print(f"| {model} | failed: {error} | | | | |", flush=True)
            bad += 1
            continue
        print(line.text(), flush=True)
        bad += line.test < line.linear - BAR
    return bad


def pair(text: str) -> tuple[str, str]:
    """MODEL=SPACE."""
    model, equals, space = text.partition("=")
    if not equals or model not in MODELS:
        raise argparse.ArgumentTypeError(f"expected MODEL=SPACE with a registered model; found {text!r}")
    return model, space


def main() -> int:
    """Measures and prints one table per dataset; 1 when a model stays below the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--table", action="append", default=[], help="a table file; may be repeated")
    parser.add_argument("--target", action="append", default=[], help="its target column, once per --table")
    parser.add_argument("--dataset", action="append", default=[], help="a table of scikit-learn; may be repeated")
    parser.add_argument(
        "--folder", default="", help="a folder with table files and a manifest.json that describes them"
    )
    parser.add_argument(
        "--names", default="shrutime,jannis,cr_361288_abalone", help="files of --folder, comma-separated"
    )
    parser.add_argument("--models", default="all", help="names, comma-separated (all)")
    parser.add_argument("--space", type=pair, action="append", default=[], help="MODEL=SPACE instead of its own space")
    parser.add_argument("--max-rows", type=cli.positive_int, default=5000, help="rows kept of a table (5000)")
    parser.add_argument("--max-epochs", type=cli.positive_int, default=60, help="epochs of a network (60)")
    parser.add_argument("--seed", type=int, default=0, help="of the split and the training (0)")
    args = parser.parse_args()
    args.space = dict(args.space)
    models = list(MODELS) if args.models == "all" else args.models.split(",")
    for model in models:
        if model not in MODELS:
            raise UnknownName("model", model, MODELS)
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, one thread")
    return int(sum([bench(ref, models, args) for ref in references(args)]) > 0)


if __name__ == "__main__":
    cli.run(main)
