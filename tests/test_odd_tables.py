"""Odd tables give predictions, or one clear line: never a traceback, never a lost row."""

from __future__ import annotations

import re
from pathlib import Path

import odd_tables
import pytest
from odd_tables import COLUMNS, MISSING, MODELS, NAMES, TARGETS, journey, note, odd_table

MANY = 210


def outcome(number: int, model: str, folder: Path) -> str:
    table = odd_table(number)
    ending = journey(table, model, folder)
    note(table, model, ending)
    assert not ending.startswith("broken"), f"table {number} ({table}):\n{ending}"
    if ending != "result":
        odd_tables.ERRORS[re.sub(r"\d+", "#", ending)[:110]] += 1
    if table.must_fail:
        assert ending != "result"
    return ending


@pytest.mark.parametrize("number", range(20))
def test_a_sample_of_odd_tables(number: int, tmp_path: Path) -> None:
    outcome(number, "xgboost", tmp_path / "p")


def test_the_tables_have_every_oddity_and_are_the_same_again() -> None:
    tables = [odd_table(number) for number in range(MANY)]
    assert {kind for table in tables for kind in table.kinds} == set(COLUMNS)
    assert {table.names for table in tables} == set(NAMES)
    assert {table.target_kind for table in tables} == set(TARGETS)
    assert {table.missing for table in tables} == set(MISSING)
    assert repr(odd_table(7).frame) == repr(tables[7].frame)


@pytest.mark.slow
@pytest.mark.parametrize("model", list(MODELS))
def test_odd_tables(model: str, tmp_path: Path) -> None:
    endings = [outcome(number, model, tmp_path / "p") for number in range(MANY)]
    good = endings.count("result")
    assert good >= 160, f"{good} of {MANY}"
