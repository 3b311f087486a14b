"""The study's journal after a kill or a full disk at any byte, and points that were half drawn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import Trial, TrialState

from bishop_ray.config import StudyConfig
from bishop_ray.data.refs import embedded_ref
from bishop_ray.data.split import DATASETS_I
from bishop_ray.errors import StorageFull
from bishop_ray.search.journal import JOURNAL, LOCK, mend, open_journal
from bishop_ray.search.samplers import SAMPLERS, sampler_factory

optuna.logging.set_verbosity(optuna.logging.ERROR)


def new_study(folder: Path) -> optuna.Study:
    return optuna.create_study(storage=open_journal(folder / JOURNAL), study_name="s", load_if_exists=True)


@settings(max_examples=40, deadline=None)
@given(st.floats(0.0, 1.0))
def test_a_journal_cut_anywhere_goes_on(tmp_path_factory: pytest.TempPathFactory, share: float) -> None:
    folder = tmp_path_factory.mktemp("cut")
    study = new_study(folder)
    for value in range(3):
        trial = study.ask()
        trial.suggest_float("x", 0, 1)
        study.tell(trial, value)
    whole = (folder / JOURNAL).read_bytes()
    begun = whole.index(b"\n") + 1  # the study itself is there
    cut = begun + round(share * (len(whole) - begun))  # dates make the length vary
    (folder / JOURNAL).write_bytes(whole[:cut])
    mend(folder / JOURNAL)
    assert (folder / JOURNAL).read_bytes() == whole[: whole.rindex(b"\n", 0, cut) + 1]
    again = new_study(folder)
    known = len(again.trials)
    again.tell(again.ask(), 5.0)
    assert len(new_study(folder).trials) == known + 1


def test_a_long_line_and_an_empty_file_are_mended(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    for content, left in ((b"", b""), (b"x" * 10_000, b""), (b"a\n" + b"x" * 10_000, b"a\n"), (b"a\nb\n", b"a\nb\n")):
        path.write_bytes(content)
        mend(path)
        assert path.read_bytes() == left
    path.unlink()
    mend(path)
    assert not path.exists()


def test_the_lock_of_a_dead_process_is_taken_away(tmp_path: Path) -> None:
    study = new_study(tmp_path)
    os.symlink(tmp_path / JOURNAL, tmp_path / LOCK)  # what Optuna leaves when it is killed while it writes
    mend(tmp_path / JOURNAL)
    began = time.monotonic()
    study.set_user_attr("a", 1)
    assert time.monotonic() - began < 5


def test_no_space_leaves_the_journal_whole(tmp_path: Path) -> None:
    """A process with a limit on file sizes meets the same error in the middle of a line as on a full disk."""
    script = textwrap.dedent(
        """
        import errno, resource, signal, sys
        from pathlib import Path
        import bishop_ray.search.journal as journal
        import optuna
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        path = Path(sys.argv[1])
        study = optuna.create_study(storage=journal.open_journal(path), study_name="s")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        journal.is_full = lambda error: error.errno == errno.EFBIG
        limit = path.stat().st_size + 30
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        before = path.read_bytes()
        try:
            study.set_user_attr("name", "x" * 500)
        except journal.StorageFull as error:
            print(error)
        assert path.read_bytes() == before, "half a line stayed"
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        study.set_user_attr("name", "y")
        """
    )
    path = tmp_path / JOURNAL
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{StorageFull(str(path))}\n"
    assert optuna.load_study(study_name="s", storage=open_journal(path)).user_attrs == {"name": "y"}
    assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("drawn", [0, 1, 2])
@pytest.mark.parametrize("finished", [2, 8])
def test_a_point_that_was_half_drawn_is_the_same_point(tmp_path: Path, sampler: str, drawn: int, finished: int) -> None:
    if sampler == "gp" and finished == 8:
        pytest.skip("the Gaussian process takes seconds")
    config = StudyConfig(embedded_ref("iris"), "mlp", "mlp", 20, 9, "auc", DATASETS_I, sampler=sampler)
    make, points = sampler_factory(config), []
    for name in ("undisturbed", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        study = new_study(folder)
        for number in range(finished):
            study.sampler = make(number)
            trial = study.ask()
            study.tell(trial, sum(point(trial).values()), state=TrialState.COMPLETE)
        study.sampler = make(finished)
        trial = study.ask()
        if name == "killed":
            point(trial, drawn)
            study = new_study(folder)
            study.sampler = make(finished)
            trial = Trial(study, study.trials[finished]._trial_id)
        points.append(point(trial))
    assert points[0] == points[1]


def point(trial: Trial, count: int = 3) -> dict[str, float]:
    return {name: trial.suggest_float(name, 0.0, 1.0) for name in ("a", "b", "c")[:count]}
