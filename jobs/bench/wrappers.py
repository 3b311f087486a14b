"""What the wrapper of a booster costs: its time against the library by hand on the same arrays with the same settings.

    python jobs/bench/wrappers.py [--rows 5000] [--repeats 9] [--threads 1] [--models xgboost lightgbm catboost]

Both sides train with early stopping on a fifth of the rows and predict these rows once; the wrapper also reports and
scores chunks of rounds. They alternate in one process; medians. CPU
time says more than wall time where the machine has other work. The table has ten numerical and ten
categorical columns with missing values.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(sys.path.pop(0))  # last: an entmax.py lies in this folder, which is not the package
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from numpy.typing import NDArray

from bishop_ray.data.table import Table, TableSpec, TaskType
from bishop_ray.tracking.environment import processor

N, C, LEVELS = 10, 10, 8
PATIENCE = 50
Data = tuple[Table, Table]


def make_data(rows: int, seed: int = 0) -> tuple[TableSpec, Data]:
    """A table of two classes, encoded as the Preprocessor does, four fifths of its rows for training."""
    rng = np.random.default_rng(seed)
    x_num = rng.normal(size=(rows, N)).astype(np.float32)
    x_cat = rng.integers(0, LEVELS, size=(rows, C)).astype(np.int64)
    signal = x_num[:, 0] * x_num[:, 1] + np.sin(2 * x_num[:, 2]) + 0.3 * x_cat[:, 0] + (x_cat[:, 1] == x_cat[:, 2])
    y = (signal + rng.normal(size=rows) > 1.3).astype(np.int64)
    x_num[rng.random(x_num.shape) < 0.05] = np.nan
    cut = rows * 4 // 5
    first, last = slice(0, cut), slice(cut, rows)
    spec = TableSpec(TaskType.BINARY, N, (LEVELS,) * C, 2)
    return spec, (Table(x_num[first], x_cat[first], y[first]), Table(x_num[last], x_cat[last], y[last]))


def numbers(table: Table) -> NDArray[np.float32]:
    """Numbers and codes in one array, missing codes as NaN: what XGBoost and LightGBM read."""
    return np.hstack([table.x_num, np.where(table.x_cat == 0, np.nan, table.x_cat).astype(np.float32)])


def xgboost_by_hand(data: Data, threads: int) -> int:
    """Trains and predicts; the number of rounds trained."""
    import xgboost

    train, val = data
    how: dict[str, Any] = {
        "feature_types": ["q"] * N + ["c"] * C, "enable_categorical": True, "nthread": threads,
    }  # fmt: skip
    fitted = xgboost.QuantileDMatrix(numbers(train), label=train.y, **how)
    held = xgboost.QuantileDMatrix(numbers(val), label=val.y, ref=fitted, **how)
    settings = {"objective": "binary:logistic", "eval_metric": "logloss", "learning_rate": RATES["xgboost"]}
    booster = xgboost.train(
        settings | {"tree_method": "hist", "nthread": threads, "seed": 0, "verbosity": 0},
        fitted, ROUNDS["xgboost"], evals=[(held, "val")], early_stopping_rounds=PATIENCE, verbose_eval=False,
    )  # fmt: skip
    booster.predict(xgboost.DMatrix(numbers(val), **how), iteration_range=(0, booster.best_iteration + 1))
    return int(booster.num_boosted_rounds())


def lightgbm_by_hand(data: Data, threads: int) -> int:
    """Trains and predicts; the number of rounds trained."""
    import lightgbm

    train, val = data
    settings = {
        "objective": "binary", "metric": "binary_logloss", "learning_rate": RATES["lightgbm"], "num_threads": threads,
        "deterministic": True, "force_row_wise": True, "bagging_freq": 1, "seed": 0, "verbosity": -1,
    }  # fmt: skip
    columns = list(range(N, N + C))
    fitted = lightgbm.Dataset(numbers(train), train.y, categorical_feature=columns, params=settings)
    held = fitted.create_valid(numbers(val), val.y)
    curve: dict[str, Any] = {}
    hooks: list[Any] = [lightgbm.early_stopping(PATIENCE, verbose=False), lightgbm.record_evaluation(curve)]
    booster = lightgbm.train(settings, fitted, ROUNDS["lightgbm"], valid_sets=[held], callbacks=hooks)
    booster.predict(numbers(val), num_threads=threads)
    return len(curve["valid_0"]["binary_logloss"])


def catboost_by_hand(data: Data, threads: int) -> int:
    """Trains and predicts; the number of rounds trained."""
    import catboost

    def pool(table: Table) -> Any:
        levels = np.arange(LEVELS).astype("S").astype(object)
        features = catboost.FeaturesData(num_feature_data=table.x_num, cat_feature_data=levels[table.x_cat])
        return catboost.Pool(features, table.y, thread_count=threads)

    train, val = data
    booster = catboost.CatBoost({
        "loss_function": "Logloss", "iterations": ROUNDS["catboost"], "learning_rate": RATES["catboost"],
        "bootstrap_type": "Bayesian", "od_type": "Iter", "od_wait": PATIENCE, "use_best_model": False,
        "random_seed": 0, "thread_count": threads, "allow_writing_files": False, "logging_level": "Silent",
    })  # fmt: skip
    booster.fit(pool(train), eval_set=pool(val))
    booster.predict(pool(val), prediction_type="Probability", thread_count=threads)
    return int(booster.tree_count_)


BY_HAND = {"xgboost": xgboost_by_hand, "lightgbm": lightgbm_by_hand, "catboost": catboost_by_hand}
ROUNDS = {"xgboost": 2000, "lightgbm": 150, "catboost": 2000}
RATES = {"xgboost": 0.02, "lightgbm": 0.03, "catboost": 0.03}
"""Of learning: small enough for hundreds of rounds, so that training counts and not the start."""


def wrapped(name: str, spec: TableSpec, data: Data, threads: int) -> int:
    """The same through the wrapper; the number of rounds trained."""
    from bishop_ray.models import create_model
    from bishop_ray.models.boosting import Boosted
    from bishop_ray.training.fit_estimator import fit_estimator

    cap = {"n_estimators" if name == "lightgbm" else "n_rounds": ROUNDS[name]}
    model = create_model(name, spec, {**cap, "patience": PATIENCE, "learning_rate": RATES[name]})
    assert isinstance(model, Boosted)
    model.n_threads = threads
    fit_estimator(model, *data, "auc", lambda report: False)
    return model.trained_rounds


def seconds(call: Callable[[], int]) -> tuple[tuple[float, float], int]:
    """Wall and CPU seconds of a call, and what it gives."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return (time.perf_counter() - wall, time.process_time() - cpu), result


def compare(name: str, spec: TableSpec, data: Data, threads: int, repeats: int) -> str:
    """A line: medians of both sides and their ratios.

    Raises:
        RuntimeError: The two sides did not train the same number of rounds, so their times say nothing.
    """
    hand: list[tuple[float, float]] = []
    ours: list[tuple[float, float]] = []
    for repeat in range(repeats + 1):
        sides = (hand, lambda: BY_HAND[name](data, threads)), (ours, lambda: wrapped(name, spec, data, threads))
        rounds = set()
        for times, call in sides if repeat % 2 else sides[::-1]:
            taken, trained = seconds(call)
            rounds.add(trained)
            if repeat:  # the first pass warms up
                times.append(taken)
        if len(rounds) != 1:
            raise RuntimeError(f"{name}: the two sides trained {sorted(rounds)} rounds")
    words = []
    for kind, mine, other in zip(("wall", "CPU"), zip(*ours, strict=True), zip(*hand, strict=True), strict=True):
        one, two = statistics.median(mine), statistics.median(other)
        pairs = statistics.median(a / b for a, b in zip(mine, other, strict=True))
        words.append(f"{kind} {two:.3f} s by hand, {one:.3f} s wrapped, ratio {one / two:.3f} (of pairs {pairs:.3f})")
    return f"{name} {importlib.import_module(name).__version__}, {rounds.pop()} rounds: {'; '.join(words)}"


def main() -> None:
    """Prints the comparison of each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=tuple(BY_HAND), default=tuple(BY_HAND))
    args = parser.parse_args()
    print(f"command: python jobs/bench/wrappers.py {' '.join(sys.argv[1:])}".rstrip())
    print(f"{args.rows} x {N + C}, {args.repeats} repeats, {args.threads} thread(s)")
    print(f"{processor()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, load {os.getloadavg()[0]:.1f}")
    spec, data = make_data(args.rows)
    for name in args.models:
        print(compare(name, spec, data, args.threads, args.repeats), flush=True)


if __name__ == "__main__":
    main()
