"""Makes ``home.tar.xz`` and ``expected.json`` of a store with the code of this checkout.

PYTHONPATH=tests python tests/data/make_old_store.py

Two searches end and register; two more, a fixed training and an ablation are killed in the middle. What these four come
to when nobody disturbs them, and what the registered models say, is written beside. Kept of each model's copy of the
package is what its loading imports, which is all that ever runs of it.
"""

import csv
import json
import platform
import re
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import old_store as store
import psutil

import bishop_ray

STUDIES = {"single": ["rents-bishop-s4"], "several": ["churn-xgboost-s0", "churn-mlp-s0"]}
MODELS = {"rents": ["champion", "bishop"], "churn": ["champion", "xgboost", "mlp", "ensemble"]}
LOADING = re.compile(r"bishop_ray(?!\.tracking|\.training)")


def in_the_middle(name: str, folder: Path) -> bool:
    """A training, or two of four, have ended; of a search some trials, and one that runs has a checkpoint."""
    home = folder / "home"
    if name == "fixed":
        return len(list(home.glob("studies/*-fixed-*/final/*/predictor/predictor.json"))) == 1
    if name == "ablation":
        return len(list(home.glob("ablations/*/runs/*.json"))) == 2
    found = [trial for study in STUDIES[name] for trial in store.trials(folder, study)]
    saved = [path for s in STUDIES[name] for path in home.glob(f"studies/{s}/trials/*/last.safetensors")]
    reports = [len(trial.intermediate_values) for trial in found if trial.state.name == "RUNNING"]
    stopped = any(trial.state.name == "PRUNED" for trial in found)
    return 4 <= len(found) <= 6 and stopped and len(saved) == len(reports) == 1 and reports[0] > 0


def kill_in_the_middle(name: str, folder: Path) -> None:
    """Runs a job until its moment and kills its process; once more from the start if the moment had passed by then."""
    before = shutil.copytree(folder / "home", folder / "before")
    for _ in range(20):
        with store.begin(store.HALF_DONE[name], folder) as job:
            while job.poll() is None and not in_the_middle(name, folder):
                time.sleep(0.005)
            job.send_signal(signal.SIGSTOP)  # nothing goes on while its children are looked for
            below = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
            job.kill()
            for left in psutil.wait_procs(below, timeout=30)[1]:  # Ray's agents look for their parent now and then
                left.kill()
        if in_the_middle(name, folder) and not list(folder.glob("home/**/optuna.journal.lock*")):
            shutil.rmtree(before)
            return
        shutil.rmtree(folder / "home")
        shutil.copytree(before, folder / "home")
    raise SystemExit(f"{name}: the moment never came")


def undisturbed(folder: Path) -> dict[str, object]:
    """What the half-done jobs come to."""
    for name, command in store.HALF_DONE.items():
        store.run([*command, "--output", f"{name}.csv"], folder)
    found = {study: store.trials(folder, study) for studies in STUDIES.values() for study in studies}
    return {
        "trials": {study: [store.facts(trial) for trial in trials] for study, trials in found.items()},
        "fixed": list(csv.DictReader((folder / "fixed.csv").open())),
        "ablation": list(csv.DictReader((folder / "ablation-runs.csv").open())),
    }


def predictions(folder: Path) -> dict[str, dict[str, list[object]]]:
    """What registered models say, by name and alias."""
    found = {name: {a: bishop_ray.load(name, a, store.tracking(folder)) for a in MODELS[name]} for name in MODELS}
    return {n: {a: store.said(model, n, folder).tolist() for a, model in found[n].items()} for n in MODELS}


def pack(folder: Path, needed: set[str]) -> None:
    """Writes the archive: without places of this machine, and without what is never read."""
    home = folder / "home"
    for copy in home.glob("mlartifacts/*/models/*/artifacts/code"):
        for path in copy.rglob("*.*"):
            if str(store.ROOT / path.relative_to(copy)) not in needed:
                path.unlink()
    for state in home.glob("studies/*/tune-*"):  # Ray Tune's own: pickles, which nothing reads
        shutil.rmtree(state)
    for old, new in ((folder, store.PLACE), (store.ROOT, "/checkout"), (platform.platform(), "Linux")):
        store.move(home, str(old), new)
    with tarfile.open(store.STORE / store.HOME, "w:xz", preset=9) as archive:
        archive.add(home, "home", filter=lambda e: e.replace(uid=0, gid=0, uname="", gname="", deep=False))


def main() -> None:
    """Makes both files."""
    with tempfile.TemporaryDirectory(prefix="old-store-") as scratch:
        folder, other = Path(scratch) / "store", Path(scratch) / "undisturbed"
        shutil.copytree(store.STORE, folder, ignore=shutil.ignore_patterns(store.HOME, store.EXPECTED))
        for command in store.FINISHED:
            store.run(command, folder)
        shutil.copytree(folder, other)
        store.move(other / "home", str(folder), str(other))
        expected = undisturbed(other) | {"predictions": predictions(folder)}
        needed = {str(m.__file__) for name, m in sys.modules.items() if LOADING.match(name)}
        for name in store.HALF_DONE:
            kill_in_the_middle(name, folder)
        pack(folder, needed)
    (store.STORE / store.EXPECTED).write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
