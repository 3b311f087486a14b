"""Kill anything at any moment, run the same command again: it ends with exactly the trials asked for."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from fault_tools import ROOT, Job, audit, moments, reports, same_search, started, study_of, terminate, trials

pytestmark = pytest.mark.faults

TRIALS, EPOCHS = 5, 4
SEED = 7
FLAGS = [
    "--dataset", "breast_cancer", "--space", str(ROOT / "tests" / "tiny_space.yaml"), "--trials", str(TRIALS),
    "--max-epochs", str(EPOCHS), "--eval-seeds", "1", "--seed", "3",
]  # fmt: skip
ONE, TWO = [*FLAGS, "--max-concurrent", "1"], [*FLAGS, "--max-concurrent", "2", "--cpus-per-trial", "0.5"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the command with one slot that nobody disturbs."""
    home = tmp_path_factory.mktemp("undisturbed")
    job = Job(ONE, home)
    assert job.wait() == 0, job.text
    audit("none", home, TRIALS)
    return home


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    """Jobs of a test; whatever still runs at its end is ended."""
    begun: list[Job] = []
    yield begun
    for job in begun:
        job.end()


def run(jobs: list[Job], flags: list[str], home: Path, prefix: Sequence[str] = (), **extra: str) -> Job:
    jobs.append(Job(flags, home, extra, prefix))
    return jobs[-1]


def test_driver_killed_at_ten_moments(undisturbed: Path, tmp_path: Path, jobs: list[Job]) -> None:
    """One slot: the study is the undisturbed one, to the last digit of every reported value."""
    delays = moments(SEED, 10, 0.4)

    def kill(job: Job, delay: float) -> None:
        time.sleep(delay)
        job.kill()

    for number in range(3):  # asked for, nothing reported yet, or just about to
        job = run(jobs, ONE, tmp_path)
        assert job.until(lambda n=number: started(tmp_path, n)), job.text
        kill(job, delays.pop() / 4)
    for more in (1, 2, 2):  # in the middle of an epoch, here or there
        before = reports(tmp_path)
        job = run(jobs, ONE, tmp_path)
        assert job.until(lambda n=before + more: reports(tmp_path) >= n), job.text
        kill(job, delays.pop())
    for _ in range(2):  # the search is over, the winner trains again
        job = run(jobs, ONE, tmp_path)
        assert job.says("final evaluation"), job.text
        kill(job, delays.pop())
    for name in ("models/m-*", "models/m-*/artifacts/MLmodel"):  # the model is on its way into the registry
        job = run(jobs, ONE, tmp_path)
        if not job.until(lambda n=name: any(tmp_path.glob(f"**/{n}"))):
            break  # it was faster than we
        kill(job, delays.pop() / 4)
    job = run(jobs, ONE, tmp_path)
    assert job.wait() == 0, job.text
    audit("driver killed, 10 moments, 1 slot", tmp_path, TRIALS)
    same_search(trials(undisturbed), trials(tmp_path))
    assert not list((study_of(tmp_path) / "trials").glob("*/*")), "checkpoints of ended trials are gone"


def test_driver_killed_with_two_slots(tmp_path: Path, jobs: list[Job]) -> None:
    delays = moments(SEED + 1, 4, 0.5)
    for more in (0, 2, 3, 2):
        before = reports(tmp_path) if list(tmp_path.glob("studies/*")) else 0
        job = run(jobs, TWO, tmp_path)
        assert job.until(lambda n=more, b=before: started(tmp_path, 0) and reports(tmp_path) >= b + n), job.text
        time.sleep(delays.pop())
        job.kill()
    job = run(jobs, TWO, tmp_path)
    assert job.wait() == 0, job.text
    audit("driver killed, 4 moments, 2 slots", tmp_path, TRIALS)
    best = max(trials(tmp_path), key=lambda t: (max(t.intermediate_values.values(), default=-1.0), -t.number))
    assert f"trial {best.number}" in next(line for line in job.lines if "final evaluation" in line)


def test_worker_killed_goes_on_from_its_checkpoint(undisturbed: Path, tmp_path: Path, jobs: list[Job]) -> None:
    job = run(jobs, ONE, tmp_path)
    for at in (1, 6):
        assert job.until(lambda n=at: reports(tmp_path) >= n), job.text
        for process in job.children("ray::ImplicitFunc"):
            process.kill()
    assert job.wait() == 0, job.text
    assert "goes on from its checkpoint" in job.text
    audit("a trial's process killed, twice", tmp_path, TRIALS)
    same_search(trials(undisturbed), trials(tmp_path))


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm(undisturbed: Path, tmp_path: Path, jobs: list[Job], sign: signal.Signals) -> None:
    """Case 57: MLflow's runs are audited too."""
    job = run(jobs, ONE, tmp_path)
    assert job.until(lambda: reports(tmp_path) >= 6), job.text
    terminate(sign, job)
    job = run(jobs, ONE, tmp_path)
    assert job.says("final evaluation"), job.text
    terminate(sign, job)
    job = run(jobs, ONE, tmp_path)
    assert job.wait() == 0, job.text
    audit(f"{sign.name}, in the search and in the final evaluation", tmp_path, TRIALS)
    same_search(trials(undisturbed), trials(tmp_path))


def test_another_host_goes_on_from_shared_storage(undisturbed: Path, tmp_path: Path, jobs: list[Job]) -> None:
    """The host that ran the search is gone; another one, which mounts the storage elsewhere, takes over."""
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make a namespace with another host name")
    mlflow = f"sqlite:///{tmp_path / 'mlflow.db'}"
    here, there = tmp_path / "here" / "storage", tmp_path / "there" / "mounted"
    job = run(jobs, ONE, here, MLFLOW_TRACKING_URI=mlflow)
    assert job.until(lambda: reports(here) >= 6), job.text
    job.kill()
    there.parent.mkdir()
    here.rename(there)
    elsewhere = ["unshare", "--uts", "sh", "-c", 'hostname elsewhere && exec "$@"', "sh"]
    job = run(jobs, ONE, there, elsewhere, MLFLOW_TRACKING_URI=mlflow)
    assert job.wait() == 0, job.text
    audit("driver killed; another host, storage mounted elsewhere", there, TRIALS, uri=mlflow)
    same_search(trials(undisturbed), trials(there))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 30 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=30m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_disk_full_in_the_search(undisturbed: Path, small_disk: Path, jobs: list[Job]) -> None:
    """Studies, checkpoints and MLflow's database share a disk that fills up. With room again nothing is missing."""
    job = run(jobs, ONE, small_disk)
    assert job.until(lambda: reports(small_disk) >= 6), job.text
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
    assert job.wait() == 2, job.text
    assert "Traceback" not in job.text
    assert job.lines[-1].startswith("error: no space left"), job.text
    filler.unlink()
    job = run(jobs, ONE, small_disk)
    assert job.wait() == 0, job.text
    audit("disk full on the storage path", small_disk, TRIALS)
    same_search(trials(undisturbed), trials(small_disk))
