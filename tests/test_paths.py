"""Files that take another's place, and an environment that comes back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bishop_ray.paths import changed_environment, replacing_file, write_whole


@pytest.mark.parametrize("flushed", [False, True])
def test_a_file_that_is_not_finished_takes_no_place(tmp_path: Path, flushed: bool) -> None:
    path = tmp_path / "folder" / "file.txt"
    write_whole(path, "old")
    with pytest.raises(UnicodeEncodeError), replacing_file(path, flushed=flushed) as part:
        part.write_text("half \ud800", "utf-8")
    assert path.read_text() == "old"
    with replacing_file(path, flushed=flushed) as part:
        part.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(path.parent) == ["file.txt"]


def test_two_writers_of_a_file_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 60)
    with replacing_file(path) as one, replacing_file(path) as other:
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one"


def test_the_environment_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THERE", "before")
    monkeypatch.delenv("MISSING", raising=False)
    with changed_environment({"THERE": "x", "MISSING": "y"}):
        assert (os.environ["THERE"], os.environ["MISSING"]) == ("x", "y")
    assert os.environ["THERE"] == "before"
    assert "MISSING" not in os.environ
