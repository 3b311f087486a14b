"""Few levels have a code each; of very many the common ones do and the rest share hashed buckets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bishop_ray.data import Preprocessor
from bishop_ray.data.categorical import FEW_LEVELS, MAX_BUCKETS, MAX_LEVELS, CategoricalColumn, fit_category
from bishop_ray.data.schema import make_raw
from bishop_ray.predictor import FORMAT, MANIFEST, Predictor

OLD = Path(__file__).parents[1] / "format_2"
"""A predictor as format 2 had it, with rows and what it predicted for them."""


def fitted(values: object) -> CategoricalColumn:
    column = fit_category(pd.Series(values, name="c"))
    assert column is not None
    return column


def codes(column: CategoricalColumn, values: object) -> list[int]:
    return column.codes(pd.Series(values, name="c", dtype=object)).tolist()


def test_few_levels_have_a_code_each() -> None:
    once = [f"level {i:02d}" for i in range(FEW_LEVELS)]
    assert fitted(once) == CategoricalColumn("c", tuple(once))
    twice = [f"level {i:04d}" for i in range(MAX_LEVELS)] * 2
    assert fitted(twice) == CategoricalColumn("c", tuple(twice[:MAX_LEVELS]))
    assert codes(fitted(twice), [None, "level 0000", "new"]) == [0, 1, 0]


def test_levels_seen_once_share_a_bucket_with_unseen_ones() -> None:
    column = fitted([f"id {i}" for i in range(300)] + ["a"] * 9 + ["b"] * 9)
    assert column == CategoricalColumn("c", ("a", "b"), 1)
    assert column.cardinality == 4
    assert codes(column, ["a", "b", "id 0", "id 7", "new", None, np.nan]) == [1, 2, 3, 3, 3, 0, 0]


@pytest.mark.parametrize("missing", [False, True])
def test_an_id_says_nothing(missing: bool) -> None:
    ids = pd.Series([f"id {i}" for i in range(300)])
    raw = make_raw(
        "t", pd.DataFrame({"id": ids.mask(ids.index < 9 * missing), "x": range(300), "y": ["a", "b"] * 150}), "y"
    )
    column = dict(Preprocessor.fit(raw).schema)
    assert ("id" in column) is missing  # that it is missing may say something
    assert Preprocessor.fit(raw).spec.cat_cardinalities == ((2,) if missing else ())


def test_codes_are_bounded_and_known_levels_apart() -> None:
    rng = np.random.default_rng(0)
    values = np.array([f"word {i}" for i in range(20_000)])[
        np.minimum(rng.exponential(3000, 60_000).astype(int), 19_999)
    ]
    column = fitted(values)
    assert (len(column.levels), column.buckets) == (MAX_LEVELS, MAX_BUCKETS)
    counts = pd.Series(values).value_counts()
    assert counts[list(column.levels)].min() >= counts.drop(list(column.levels)).max()
    found = column.codes(pd.Series([*values, "unseen", None]))
    assert found[-1] == 0
    assert found[:-1].min() == 1
    assert found.max() < column.cardinality == 1 + MAX_LEVELS + MAX_BUCKETS
    assert len(np.unique(found[found > MAX_LEVELS])) == MAX_BUCKETS
    again = CategoricalColumn.from_dict(json.loads(json.dumps(column.to_dict())))
    assert again == column
    assert fitted(values[rng.permutation(len(values))]) == column  # whatever the order of the rows


def test_few_repeated_levels_open_few_buckets() -> None:
    values = [f"word {i:04d}" for i in range(MAX_LEVELS + 3)] * 2 + [f"once {i}" for i in range(10)]
    column = fitted(values)
    assert (len(column.levels), column.buckets) == (MAX_LEVELS, 3)


def test_buckets_are_the_same_in_every_process_and_dtype() -> None:
    column = CategoricalColumn("c", ("a",), 256)
    texts = ["a", "x", "Москва", "🎈", "", "1", "\ud800", "x" * 10_000]
    expected = codes(column, texts)
    assert expected == [1, 81, 208, 161, 182, 120, 106, 77]
    code = (
        "import sys, json\nfrom bishop_ray.data.categorical import CategoricalColumn\nimport pandas as pd\n"
        "print(CategoricalColumn('c', ('a',), 256).codes(pd.Series(json.loads(sys.argv[1]), dtype=object)).tolist())"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(texts)],
        cwd=root, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7", "PYTHONPATH": str(root)},
    )  # fmt: skip
    assert json.loads(done.stdout) == expected
    for one in (1, 1.0, np.float32(1), "1.0", True):
        assert (codes(column, [one]) == codes(column, ["1"])) is (one is not True)


def test_a_predictor_of_format_2_predicts_as_it_did() -> None:
    """Written before there were calendar parts and buckets, by the code of that time."""
    assert json.loads((OLD / MANIFEST).read_text())["format"] == 2 < FORMAT
    predictor = Predictor.load(OLD)
    expected = json.loads((OLD / "expected.json").read_text())
    rows = pd.DataFrame(expected["rows"])
    assert predictor.schema == (("size", "number"), ("day", "moment"), ("kind", "category"))
    np.testing.assert_allclose(predictor.predict_proba(rows), expected["probabilities"], rtol=1e-6)
    assert predictor.predict(rows).tolist() == expected["labels"]
    assert np.ptp(np.array(expected["probabilities"])[:, 0]) > 0.01
    moments = rows.assign(day=pd.to_datetime(rows["day"]))
    np.testing.assert_allclose(predictor.predict_proba(moments), expected["probabilities"], rtol=1e-6)


def test_old_and_new_manifests_of_a_plain_table_are_the_same(tmp_path: Path) -> None:
    """So are the fingerprints by which registered versions are told apart."""
    predictor = Predictor.load(OLD)
    saved = json.loads((predictor.save(tmp_path / "p") / MANIFEST).read_text())
    old = json.loads((OLD / MANIFEST).read_text())
    assert {**saved, "format": 2, "bishop_ray": ""} == {**old, "bishop_ray": ""}


@pytest.mark.slow
def test_no_table_of_the_benchmarks_has_dates_or_many_levels(shared: Path) -> None:
    """Their features, and so their scores, are what they were without calendar parts and buckets."""
    described = json.loads((shared / "data" / "manifest.json").read_text())["datasets"]
    assert len(described) > 50
    for entry in described:
        frame = pd.read_parquet(shared / "data" / entry["file"])
        frame = frame.sample(min(len(frame), 20_000), random_state=0)
        raw = make_raw(entry["name"], frame, entry["target"], categorical=entry["categorical_columns"])
        fitted = Preprocessor.fit(raw)
        assert not any(column.moment for column in fitted.numbers), entry["name"]
        assert not any(column.buckets for column in fitted.categories), entry["name"]
