"""Trials that go wrong in every way: each ends as what it is, with its reason, and the study goes on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import faulty_model
import pytest
from fault_tools import TABLE, ray_with
from optuna.trial import TrialState

from bishop_ray.config import Resources, StudyConfig
from bishop_ray.data.refs import embedded_ref
from bishop_ray.data.split import SplitProtocol
from bishop_ray.errors import StorageFull
from bishop_ray.paper.ablations.run import AblationConfig, run_ablation
from bishop_ray.paper.ablations.settings import Setting
from bishop_ray.search.callback import Progress
from bishop_ray.search.search import run_study
from bishop_ray.search.study import read_study, study_folder
from bishop_ray.tracking import check_tracking, runs_frame
from bishop_ray.training.ray_train import RESTARTS

pytestmark = pytest.mark.faults


@pytest.fixture(scope="module")
def ray_here() -> Iterator[None]:
    with ray_with(faulty_model):
        yield


def study(tmp_path: Path, *ways: str) -> StudyConfig:
    space = tmp_path / "space.yaml"
    first = "".join(f"\n  - {{model: {{way: {way}}}}}" for way in ways)
    choice = ", ".join(f'"{way}"' for way in (*ways, "fine"))
    space.write_text(f"# ways\nmodel:\n  way: {{choice: [{choice}]}}\n  place: {tmp_path}\nfirst:{first}\n")
    return StudyConfig(
        embedded_ref("iris"), faulty_model.NAME, str(space), len(ways), 3, "auc", SplitProtocol((0.7, 0.2, 0.1)),
        scheduler="none", eval_seeds=1, resources=Resources(cpus=0.5), max_concurrent=2, trial_limit=15.0,
        storage=str(tmp_path / "store"), tracking_uri=check_tracking(f"sqlite:///{tmp_path}/mlflow.db"),
    )  # fmt: skip


def test_every_way_ends_as_what_it_is(ray_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bishop_ray.search.callback.HANG_SECONDS", 5.0)
    config = study(tmp_path, "hangs", "raises", "memory", "dies", "dies once", "fine")
    events: list[str] = []
    result = run_study(config, lambda progress: events.append(progress.last))
    assert result.trials == {"complete": 2, "failed": 4}
    trials = {t.params["model.way"]: t for t in read_study(study_folder(config)).trials}
    reasons = {way: trial.user_attrs["reason"] for way, trial in trials.items()}
    assert reasons["raises"] == "KeyError: 'a fault of its own'"
    assert reasons["memory"] == "MemoryError: cannot allocate 5 terabytes"
    assert reasons["dies"].startswith(f"its process died {RESTARTS + 1} times: ")
    assert reasons["hangs"].startswith("hung: over the limit of 15 s, and no report for ")
    for way, trial in trials.items():
        assert trial.state == (TrialState.COMPLETE if way in ("fine", "dies once") else TrialState.FAIL), way
    traceback = (study_folder(config) / "errors" / f"{trials['raises'].number:04d}.txt").read_text()
    assert "_go_wrong" in traceback
    assert sum("goes on from its checkpoint" in event for event in events) >= RESTARTS + 1
    runs = runs_frame(config.tracking_uri, "iris")
    assert sorted(runs["status"]) == ["FAILED"] * 4 + ["FINISHED"] * 3
    TABLE.append(
        {
            "fault": "trials: hangs, raises, no memory, dies 4 times, dies once, fine", "asked": 6, "finished": 2,
            "early-stopped": 0, "failed": 4, "lost": 0, "duplicated": 0, "MLflow runs": "4 FAILED, 3 FINISHED",
        }
    )  # fmt: skip


def test_a_process_that_lost_its_gpu_takes_no_further_trial(ray_here: None, tmp_path: Path) -> None:
    config = replace(study(tmp_path, "loses the card", "fine"), max_concurrent=1)
    assert run_study(config).trials == {"complete": 1, "failed": 1}
    failed, fine = read_study(study_folder(config)).trials
    assert failed.user_attrs["reason"] == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert fine.state == TrialState.COMPLETE
    assert (tmp_path / "loses the card.pid").read_text() != (tmp_path / "fine.pid").read_text()


def test_no_space_ends_the_study_and_loses_nothing(ray_here: None, tmp_path: Path) -> None:
    config = replace(study(tmp_path, "fine", "full", "fine"), max_concurrent=1)
    with pytest.raises(StorageFull, match="the same command goes on"):
        run_study(config)
    states = [t.state for t in read_study(study_folder(config)).trials]
    assert states[:2] == [TrialState.COMPLETE, TrialState.RUNNING], "it is no failure of the trial's"
    assert "RUNNING" not in set(runs_frame(config.tracking_uri, "iris")["status"])
    (tmp_path / "freed").touch()
    result = run_study(config)
    assert result.trials == {"complete": 3}
    assert sorted(runs_frame(config.tracking_uri, "iris")["status"]) == ["FINISHED"] * 4


def test_no_space_in_the_final_evaluation_is_the_same_line(ray_here: None, tmp_path: Path) -> None:
    config = study(tmp_path, "full at the end")
    with pytest.raises(StorageFull, match="the same command goes on"):
        run_study(config)
    assert [t.state for t in read_study(study_folder(config)).trials] == [TrialState.COMPLETE]
    assert "RUNNING" not in set(runs_frame(config.tracking_uri, "iris")["status"])
    (tmp_path / "freed").touch()
    assert run_study(config).trials == {"complete": 1}
    assert sorted(runs_frame(config.tracking_uri, "iris")["status"]) == ["FINISHED"] * 2


def test_a_trial_that_waits_says_for_what(ray_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr("bishop_ray.search.stopper.PENDING_SECONDS", 2.0)

    @ray.remote(num_cpus=ray.cluster_resources()["CPU"])
    class Holder:
        def ready(self) -> bool:
            return True

    holder: list[Any] = [Holder.remote()]
    assert ray.get(holder[0].ready.remote())
    said: list[str] = []

    def listener(progress: Progress) -> None:
        if "waits for" in progress.last:
            said.append(progress.last)
            while holder:
                ray.kill(holder.pop())

    result = run_study(study(tmp_path, "fine"), listener)
    assert said[0] == "trial 0 waits for 0.5 CPU (0 CPU free)"
    assert result.trials == {"complete": 1}


def ablation(tmp_path: Path, *ways: str) -> AblationConfig:
    """An ablation whose settings go wrong; the first one is what the others are compared with."""
    config = replace(study(tmp_path, *ways), metric="auc")
    settings = tuple(Setting(way.replace(" ", "_"), faulty_model.NAME, {"way": way}) for way in ways)
    base = {"model": {"way": ways[0], "place": str(tmp_path)}, "train": {}}
    names = {faulty_model.NAME: settings[0].name}
    return AblationConfig("components", settings, {faulty_model.NAME: base}, {faulty_model.NAME: config}, names)


def test_runs_of_an_ablation_end_as_what_they_are(ray_here: None, tmp_path: Path) -> None:
    config = ablation(tmp_path, "fine", "raises", "memory", "dies", "dies once")
    result = run_ablation(config)
    status = {r.setting: r.status for r in result.records}
    assert status == {"fine": "complete", "raises": "failed", "memory": "failed", "dies": "failed",
                      "dies_once": "complete"}  # fmt: skip
    reasons = {r.setting: r.reason for r in result.records}
    assert reasons["raises"] == "KeyError: 'a fault of its own'"
    assert reasons["memory"] == "MemoryError: cannot allocate 5 terabytes"
    assert reasons["dies"].startswith("its process died: ")
    openings = {r.setting: r.test_openings for r in result.records}
    assert openings == {"fine": 1, "raises": 0, "memory": 0, "dies": 0, "dies_once": 1}
    assert "a fault of its own" in (config.folder / "errors" / "unruly-raises-s1.txt").read_text()
    told = runs_frame(config.study.tracking_uri, "ablation-components").set_index("params.setting")
    assert dict(told["status"]) == {n: "FINISHED" if s == "complete" else "FAILED" for n, s in status.items()}


def test_no_space_while_an_ablation_runs(ray_here: None, tmp_path: Path) -> None:
    config = ablation(tmp_path, "fine", "full")
    with pytest.raises(StorageFull):
        run_ablation(config)
    (tmp_path / "freed").touch()
    result = run_ablation(config)
    assert [r.status for r in result.records] == ["complete", "complete"]
