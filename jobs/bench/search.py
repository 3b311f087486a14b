"""What a search costs: its throughput against plain Optuna and XGBoost with the same points, slots and threads.

    python jobs/bench/search.py [--rows 40000] [--trials 16] [--repeats 3]
    python jobs/bench/search.py --fake-trials 200 [--seconds 5]

Ours: a study of this project with Ray Tune, the Optuna journal on disk, MLflow (SQLite) and a saved model per trial; no
trial is stopped early. Plain: an in-memory Optuna study that trains the same points by XGBoost's own interface in as
many threads (XGBoost releases Python's lock), with early stopping on the same rows; nothing is stored. They alternate
in one process; throughput is trials per second from the first trial's start to the last one's end. CPU time over wall
time of a trial says whether it keeps to its threads.

With ``--fake-trials`` trials only sleep, and the search's wall time is compared with the ideal: trials x seconds /
slots. Everything else is the product: Tune with ASHA, TPE, the journal, MLflow on SQLite, a saved model per trial.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import pandas as pd

from bishop_ray import cli
from bishop_ray.config import Params, Resources, StudyConfig
from bishop_ray.data.refs import file_ref
from bishop_ray.data.split import SplitProtocol
from bishop_ray.tracking.environment import processor

SPACE = """# a bench's own: slow learners, so that a trial takes seconds
model:
  max_depth: {int: [6, 8]}
  subsample: {float: [0.7, 1.0]}
  colsample_bytree: {float: [0.7, 1.0]}
  learning_rate: {float: [0.02, 0.05], log: true}
  n_rounds: 600
"""


def make_table(path: Path, rows: int) -> None:
    """A binary table of 20 numerical columns that takes hundreds of rounds to learn."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 20))
    signal = x[:, 0] * x[:, 1] + np.sin(3 * x[:, 2]) * x[:, 3] + x[:, 4:8].sum(axis=1) * 0.3
    frame = pd.DataFrame(x, columns=[f"x{i}" for i in range(20)])
    frame["y"] = np.where(signal + rng.normal(size=rows) > 0, "yes", "no")
    frame.to_parquet(path)


def ours(config: StudyConfig) -> tuple[float, list[Params]]:
    """Wall seconds of the search's trials, and their points."""
    from bishop_ray.search.callback import Progress
    from bishop_ray.search.dataset import load
    from bishop_ray.search.search import run_study
    from bishop_ray.search.space import load_space
    from bishop_ray.search.study import open_study, params_of

    times: list[float] = []

    def listener(progress: Progress) -> None:
        if progress.last.startswith("trial") and ("started" in progress.last or " complete" in progress.last):
            times.append(time.perf_counter())

    run_study(config, listener)
    loaded = load(config)
    opened = open_study(loaded.config, load_space(config.space, config.model), loaded.fingerprint)
    return times[-1] - times[0], [params_of(opened.study, number) for number in range(config.trials)]


def plain(config: StudyConfig, points: list[Params]) -> tuple[float, float]:
    """Wall seconds of the same trainings under plain Optuna, and the median seconds of one."""
    import optuna
    import xgboost
    from sklearn.metrics import roc_auc_score

    from bishop_ray.search.dataset import load, prepare

    data = prepare(load(config)).data
    threads = int(config.resources.cpus)
    single: list[float] = []

    def objective(trial: optuna.Trial) -> float:
        point = points[trial.number]["model"]
        began = time.perf_counter()
        how = {name: value for name, value in point.items() if name != "n_rounds"}
        how |= {"objective": "binary:logistic", "eval_metric": "logloss", "nthread": threads, "verbosity": 0}
        train = xgboost.QuantileDMatrix(data.train.x_num, label=data.train.y, nthread=threads)
        held = xgboost.QuantileDMatrix(data.validation.x_num, label=data.validation.y, ref=train, nthread=threads)
        booster = xgboost.train(
            how, train, point["n_rounds"], evals=[(held, "val")], early_stopping_rounds=50, verbose_eval=False
        )
        score = roc_auc_score(data.validation.y, booster.predict(held))
        single.append(time.perf_counter() - began)
        return float(score)

    study = optuna.create_study(direction="maximize")
    began = time.perf_counter()
    study.optimize(objective, n_trials=len(points), n_jobs=config.max_concurrent)
    return time.perf_counter() - began, statistics.median(single)


def keeps_to_its_threads(config: StudyConfig, point: Params) -> float:
    """CPU seconds over wall seconds of one training by the trial's own path."""
    from bishop_ray.search.dataset import load, prepare
    from bishop_ray.training.job import TrialSettings, train_here

    loaded = load(config)
    settings = TrialSettings(
        config.model, loaded.config.metric, config.max_epochs, 0, config.resources, "inprocess", "", None
    )
    data = prepare(loaded).data
    wall, cpu = time.perf_counter(), time.process_time()
    train_here(settings.trial(point), data, Path("unused"), lambda _: False)
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


def study(folder: Path, table: Path, trials: int, slots: int, seed: int) -> StudyConfig:
    """A search without early stopping of trials."""
    from bishop_ray.tracking import check_tracking

    space = folder / "space.yaml"
    space.write_text(SPACE, "utf-8")
    return StudyConfig(
        ref=file_ref(table, "y"), model="xgboost", space=str(space), trials=trials, max_epochs=20, metric="auc",
        split=SplitProtocol((0.7, 0.2, 0.1)), sampler="random", scheduler="none", seed=seed, eval_seeds=1,
        max_concurrent=slots, storage=str(folder), tracking_uri=check_tracking(f"sqlite:///{folder}/mlflow.db"),
        resources=Resources(1.0),
    )  # fmt: skip


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rows", type=cli.positive_int, default=40_000, help="rows of the table (40000)")
    parser.add_argument("--trials", type=cli.positive_int, default=16, help="trials of a search (16)")
    parser.add_argument("--repeats", type=cli.positive_int, default=3, help="searches of each side (3)")
    parser.add_argument("--fake-trials", type=cli.positive_int, help="trials that only sleep, instead of all this")
    parser.add_argument("--seconds", type=cli.positive_float, default=5.0, help="sleep of a fake trial (5)")
    args = parser.parse_args()
    from importlib.metadata import version

    from bishop_ray.search.cluster import connect

    if args.fake_trials:
        import sleeper

        sleeper.prepare_ray()
    versions: list[Any] = [f"{name} {version(name)}" for name in ("ray", "optuna", "mlflow", "xgboost")]
    print(", ".join([processor(), f"{os.cpu_count()} CPUs", f"Python {platform.python_version()}", *versions]))
    slots = int(connect().cpus)
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        table = folder / "table.parquet"
        make_table(table, 1000 if args.fake_trials else args.rows)
        if args.fake_trials:
            import slots as filling

            filling.measure(folder, table, args.fake_trials, args.seconds, slots)
            return 0
        for seed in range(args.repeats):
            config = study(folder, table, args.trials, slots, seed)
            seconds, points = ours(config)
            alone, single = plain(config, points)
            ratios.append(alone / seconds)
            print(
                f"{args.trials} trials of {single:.1f} s (median), {slots} at a time: ours {seconds:.1f} s, plain "
                f"{alone:.1f} s, throughput ratio {alone / seconds:.3f}",
                flush=True,
            )
        print(f"CPU time over wall time of one trial with 1 CPU: {keeps_to_its_threads(config, points[0]):.2f}")
    print(f"median throughput ratio {statistics.median(ratios):.3f} (ours / plain)")
    return 0


if __name__ == "__main__":
    cli.run(main)
