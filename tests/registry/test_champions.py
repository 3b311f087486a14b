"""Who is champion, who challenges, and how people move an alias and take it back; real MLflow on SQLite."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fakes import make_table
from mlflow.tracking import MlflowClient
from predictor_fakes import make_predictor

from bishop_ray import cli
from bishop_ray.cli import models
from bishop_ray.data.table import TaskType
from bishop_ray.errors import UnknownName, UserError
from bishop_ray.metrics.bootstrap import Scored
from bishop_ray.registry import Evidence, Validation, register_best
from bishop_ray.registry.aliases import move_alias, moves, versions_before
from bishop_ray.registry.loading import list_versions
from bishop_ray.tracking import StudyTracker

pytest_plugins = ("tracking_fixtures",)
RAW = make_table(TaskType.BINARY, rows=300, with_missing=True)
NAME = "CC-wine"
Y = RAW.target.map({"no": 0, "yes": 1}).to_numpy()


def evidence(wrong: int, key: str = "rows", trained: float = 0.0, seed: int = 0) -> Evidence:
    """Validation predictions that are wrong in so many rows; `trained` spoils what the training process said."""
    output = np.eye(2)[Y] * 0.8 + 0.1
    output[:wrong] = output[:wrong, ::-1]
    own = make_predictor(RAW, seed).output(RAW.frame) + trained
    return Evidence(RAW.frame, own, validation=Validation(key, Scored(Y, output)))


@pytest.fixture(scope="module")
def store(new_database: tuple[Path, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry with a version of each kind.

    Version 1 is wrong in 60 of 300 rows, 2 in 58, 3 in 10, all of different searches; 4 fails the gate.
    """
    folder = tmp_path_factory.mktemp("registry")
    shutil.copy(new_database[0], folder / "mlflow.db")
    uri = f"sqlite:///{folder}/mlflow.db"
    tracker = StudyTracker(uri, "CC", "CC-wine-bishop-s0", folder=folder / "study")
    for number, wrong in enumerate((60, 58, 10, 0), start=1):
        made = register_best(
            make_predictor(RAW, number), NAME, alias="bishop", val_score=1 - wrong / 300, example=RAW.frame.head(3),
            run_id=tracker.parent_run_id(), evidence=evidence(wrong, trained=0.01 * (number == 4), seed=number),
            uri=uri, study_id=f"study {number}", data_key="data", metric="accuracy", metrics={"test_score": 0.5},
            tags={"trained_on": "train", "seed": "3"},
        )  # fmt: skip
        verdict = {
            1: "the first version",
            2: "no: not beyond chance better than version 1",
            3: "yes: better than version 1",
            4: "refused: as trained: other predictions than stored in 64 of 64 rows, by up to 0.01",
        }
        assert made.verdict.startswith(verdict[number]), made
        assert made.champion == (number in (1, 3))
    assert tracker.close(timeout=20)
    return folder


@pytest.fixture
def place(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A copy of its database, to be changed."""
    monkeypatch.setenv("BISHOP_RAY_ARTIFACT_ROOTS", str(store / "mlartifacts"))
    shutil.copy(store / "mlflow.db", tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


def aliases(uri: str) -> dict[str, int]:
    return {name: int(number) for name, number in MlflowClient(uri).get_registered_model(NAME).aliases.items()}


def command(*flags: str) -> int:
    return models.run_models(models.models_parser().parse_args(flags))


def test_the_champion_moves_only_on_a_difference_beyond_chance(place: str) -> None:
    assert aliases(place) == {"bishop": 3, "challenger": 2, "champion": 3}
    client = MlflowClient(place)
    tags = {number: client.get_model_version(NAME, str(number)).tags for number in (1, 2, 3, 4)}
    assert tags[2]["bishop.champion"].endswith("on 300 rows")
    assert [tags[number]["bishop.gate"].split(":")[0] for number in tags] == ["passed"] * 3 + ["failed"]
    assert "bishop.champion" not in tags[4]
    known = {"seed", "task", "bishop.contract", "version.python", "version.torch", "version.pandas", "platform"}
    assert known <= tags[4].keys()
    assert len({row["bishop.contract"] for row in tags.values()}) == 1, "columns and labels are the same"
    model = client.get_registered_model(NAME)
    assert [(move.before, move.after) for move in moves(model, "champion")] == [("", "1"), ("1", "3")]
    assert [move.after for move in moves(model, "bishop")] == ["1", "2", "3"]


def test_rollback_goes_back_step_by_step(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("promote", NAME, "--version", "2", "--force") == 0
    assert "forced, although version 2 is not better than version 3" in capsys.readouterr().out
    assert aliases(place) == {"bishop": 3, "champion": 2}, "a challenger that won is none any more"
    assert command("rollback", NAME) == 0
    assert command("rollback", NAME) == 0
    assert aliases(place)["champion"] == 1
    assert command("rollback", NAME) == cli.EXIT_FAILED
    text = capsys.readouterr().out
    assert "champion: version 2 -> version 3" in text
    assert "champion: version 3 -> version 1" in text
    assert "champion stays version 1: no earlier version is in its history" in text
    assert command("promote", NAME, "--version", "3") == 0
    assert "version 3 against version 1: score (larger is better) 0.966667 against 0.8: +0.1667" in (
        text := capsys.readouterr().out
    )
    assert text.splitlines()[-1] == f"{NAME} champion: version 1 -> version 3"
    assert command("rollback", NAME, "--alias", "bishop") == 0
    assert aliases(place) == {"bishop": 2, "champion": 3}


def test_a_move_by_other_hands_or_without_its_history_is_taken_back(place: str) -> None:
    client = MlflowClient(place)
    client.set_registered_model_alias(NAME, "champion", "2")  # in MLflow's UI, or a process killed before the note
    assert command("rollback", NAME) == 0
    assert aliases(place)["champion"] == 3
    client.delete_model_version(NAME, "1")
    assert command("rollback", NAME) == cli.EXIT_FAILED, "what was deleted is passed over"
    assert versions_before(client.get_registered_model(NAME), "champion")[-1] == "3"


def test_a_registration_killed_between_alias_and_history_is_completed(place: str) -> None:
    client = MlflowClient(place)
    client.delete_registered_model_tag(NAME, "bishop.move.champion.000001")
    client.delete_model_version_tag(NAME, "3", "bishop.aliases")
    run_id = str(client.get_model_version(NAME, "3").run_id)
    again = register_best(
        make_predictor(RAW, 3), NAME, alias="bishop", val_score=29 / 30, example=RAW.frame.head(3), run_id=run_id,
        evidence=evidence(10, seed=3), uri=place, study_id="study 3", data_key="data", metric="accuracy",
    )  # fmt: skip
    assert (again.version, again.created, again.champion) == (3, False, True)
    assert versions_before(client.get_registered_model(NAME), "champion") == ["1", "3"]
    assert command("rollback", NAME) == 0
    assert aliases(place)["champion"] == 1


def test_promote_asks_gate_and_rows(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("promote", NAME, "--version", "2") == cli.EXIT_FAILED
    assert "champion stays version 3: version 2 is not better" in capsys.readouterr().out
    assert command("promote", NAME, "--version", "4") == cli.EXIT_FAILED
    assert "champion stays version 3: the gate stays shut: as trained:" in capsys.readouterr().out
    assert aliases(place)["champion"] == 3
    assert command("promote", NAME, "--version", "4", "--force") == 0
    assert "forced, although the gate stays shut: as trained:" in capsys.readouterr().out
    assert aliases(place)["champion"] == 4
    assert command("promote", NAME, "--version", "4") == 0
    assert "is version 4 already" in capsys.readouterr().out
    assert command("promote", NAME, "--version", "1", "--alias", "production") == 0, "a new alias has nobody to beat"
    assert aliases(place)["production"] == 1
    MlflowClient(place).set_model_version_tag(NAME, "2", "bishop.validation", "other rows")
    assert command("promote", NAME, "--version", "2", "--alias", "production") == cli.EXIT_FAILED
    assert "selected on different validation rows; --holdout compares" in capsys.readouterr().out


@pytest.mark.slow
def test_holdout_decides_by_the_files_rows(place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    frame = make_table(TaskType.BINARY, rows=300, seed=9).frame
    labels = make_predictor(RAW, 2).predict(frame)
    assert (labels != make_predictor(RAW, 3).predict(frame)).mean() > 0.1, "otherwise nothing is to be seen"
    file = tmp_path / "march.csv"
    frame.assign(**{str(RAW.target.name): labels.where(np.arange(300) > 2)}).to_csv(file, index=False)
    assert command("promote", NAME, "--version", "2", "--holdout", str(file)) == 0
    text = capsys.readouterr().out
    assert "left out 3 rows without a target" in text
    assert "version 2 against version 3: score (larger is better) 1 against" in text
    assert aliases(place)["champion"] == 2
    assert command("promote", NAME, "--version", "3", "--holdout", str(file)) == cli.EXIT_FAILED
    pd.read_csv(file).drop(columns=str(RAW.target.name)).to_csv(file, index=False)
    with pytest.raises(UserError, match=r"--holdout: \S*march\.csv: missing column 'y'"):
        command("promote", NAME, "--version", "3", "--holdout", str(file))
    with pytest.raises(UserError, match=r"none\.csv"):
        command("promote", NAME, "--version", "3", "--holdout", str(tmp_path / "none.csv"))
    assert aliases(place)["champion"] == 2


def test_versions_and_reasons_may_be_many(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More versions than a server hands out at once, and a reason that would be too long for a tag as ASCII."""
    monkeypatch.setattr("bishop_ray.registry.aliases.PAGE", 1)
    assert len(list_versions(NAME, place)) == 4
    client = MlflowClient(place)
    move_alias(client, NAME, "champion", "1", "\N{CYRILLIC SMALL LETTER ZHE}" * 1000)
    model = client.get_registered_model(NAME)
    assert max(map(len, model.tags.values())) < 5000
    assert moves(model, "champion")[-1].reason == "\N{CYRILLIC SMALL LETTER ZHE}" * 1000
    assert command("rollback", NAME) == 0
    assert aliases(place)["champion"] == 3
    assert command("promote", NAME, "--version", "1", "--force") == 0
    assert aliases(place)["champion"] == 1


def test_the_list(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("list") == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert cells[0] == [
        "name",
        "version",
        "aliases",
        "model",
        "metric",
        "validation",
        "test",
        "gate",
        "created",
        "size",
    ]
    assert cells[1][:8] == [NAME, "4", "-", "bishop", "accuracy", "1.0000", "0.5000", "failed"]
    assert cells[2][:8] == [NAME, "3", "bishop, champion", "bishop", "accuracy", "0.9667", "0.5000", "passed"]
    assert [row[1] for row in cells[1:]] == ["4", "3", "2", "1"]
    assert command("list", NAME, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["gate"].startswith("failed: as trained:")
    assert rows[2]["aliases"] == ["challenger"]
    assert rows[1]["size_bytes"] > 1000


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        (["list", "CC-wime"], UnknownName, "did you mean 'CC-wine'"),
        (["promote", "CC-wine", "--version", "9"], UnknownName, "unknown version of CC-wine '9'"),
        (["promote", "CC-wine", "--version", "1", "--alias", "v1"], UserError, "--alias: expected letters"),
        (["promote", "CC-wine", "--version", "x"], UserError, "--version: expected a whole number"),
        (["promote", "CC-wine"], UserError, "--version"),
        (["promote", "new", "--version", "1", "--holdout", "no.csv"], UserError, "--holdout: no.csv: expected a table"),
        (["rollback", "CC-wine", "--alias", "chmpion"], UnknownName, "did you mean 'champion'"),
    ],
)
def test_bad_input_is_one_clear_line(place: str, flags: list[str], error: type[UserError], words: str) -> None:
    with pytest.raises(error) as caught:
        command(*flags)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_question_makes_no_store(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"found no file .*none\.db"):
        command("list", "--tracking-uri", f"sqlite:///{tmp_path}/none.db")
    assert not (tmp_path / "none.db").exists()


@pytest.mark.slow
def test_scores_of_other_rows_make_a_challenger_only(
    uri: str, tracker_of: Callable[..., StudyTracker], caplog: pytest.LogCaptureFixture
) -> None:
    run_id = tracker_of(uri).parent_run_id()

    def register(seed: int, key: str, score: float, **more: object) -> str:
        known = None if not key else evidence(0, key, seed=seed)
        made = register_best(
            make_predictor(RAW, seed), NAME, alias="bishop", val_score=score, example=RAW.frame.head(3), run_id=run_id,
            evidence=known, uri=uri, metric="accuracy", **{"study_id": str(seed), **more},
        )  # fmt: skip
        return made.verdict

    register(0, "split 0", 0.5)
    assert "selected on different validation rows" in register(1, "split 1", 0.9)
    assert aliases(uri) == {"bishop": 2, "champion": 1, "challenger": 2}
    assert "no predictions of validation rows lie with version 3" in register(2, "", 0.8)
    assert aliases(uri) == {"bishop": 3, "champion": 1, "challenger": 2}, "the better challenger stays"
    assert register(3, "split 1", 0.6, search="0").startswith("yes: 0.6 against 0.5"), "the same search ranks"
