"""The benchmarks that train: two sides against the clock, and how an epoch's time grows."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from bishop_ray.errors import UserError

BENCH = Path(__file__).resolve().parents[2] / "jobs" / "bench"
SMALL = {
    "d_embedding": 4, "stride": 2, "n_pool": 2, "n_merge": 2, "d_model": 8, "d_ff": 8, "n_heads": 2,
    "n_encoder_levels": 1, "decoder": False, "n_decoded": 2,
}  # fmt: skip
LINEAR = """
import torch
class BiSHop(torch.nn.Module):
    def __init__(self, n_cat, n_num, n_out, **rest):
        super().__init__()
        self.map, self.seen = torch.nn.Linear(n_num, n_out), False
    def get_bins(self, data):
        self.seen = True
    def forward(self, x_cat, x_num):
        assert self.seen and x_num.dtype == torch.float32 and x_cat.dtype == torch.int64
        return self.map(x_num)
"""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scripts() -> Any:
    sys.path.insert(0, str(BENCH))
    try:
        return {name: importlib.import_module(name) for name in ("quality", "growth")}
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """A table of 200 rows in a described folder, and a release whose network is linear."""
    random = np.random.default_rng(0)
    frame = pd.DataFrame(random.standard_normal((200, 3)), columns=list("abc"))
    frame["kind"] = random.choice(["u", "v"], 200)
    frame["class"] = np.where(frame["a"] + frame["b"] + 0.5 * random.standard_normal(200) > 0, "yes", "no")
    frame.to_parquet(tmp_path / "tiny.parquet")
    entry = {"file": "tiny.parquet", "target": "class"}
    (tmp_path / "manifest.json").write_text(json.dumps({"datasets": [entry]}))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "model.py").write_text(LINEAR)
    return ["--data", str(tmp_path), "--reference", str(tmp_path)]


def test_scores_against_the_clock(scripts: Any) -> None:
    quality = scripts["quality"]
    theirs, ours = quality.Run(), quality.Run()
    for run, step, scores in ((theirs, 10.0, (0.6, 0.8, 0.8)), (ours, 2.0, (0.7, 0.81, 0.79, 0.9))):
        for number, score in enumerate(scores, 1):
            run.note(step * number, score, lambda score=score: score - 0.1)
    row = quality.compare(theirs, ours)
    assert (row["their val"], row["their s"]) == (0.8, 20.0), "the first of equal epochs"
    assert row["their test"] == pytest.approx(0.7)
    assert (row["our s to it"], row["ratio"]) == (4.0, 5.0)
    assert row["our test there"] == pytest.approx(0.71)
    assert (row["our val same epochs"], row["our val"], row["our s"]) == (0.81, 0.9, 8.0)
    assert (row["epoch s theirs"], row["epoch s ours"]) == (10.0, 2.0)
    late = quality.compare(ours, theirs)
    assert late["ratio"] is None
    assert "our s to it" not in late


def test_a_seed_that_never_arrives_counts_as_the_worst(scripts: Any) -> None:
    quality = scripts["quality"]
    empty = dict.fromkeys(quality.NUMBERS, 1.0) | {"dataset": "t"}
    rows = [empty | {"ratio": ratio, "our s to it": seconds} for ratio, seconds in ((8.0, 2.0), (None, None), (4.0, 3))]
    line = quality.summary(rows, "t")
    assert (line["ratio"], line["our s to it"]) == (4.0, 3.0)
    assert quality.summary([rows[1], rows[1], rows[0]], "t")["ratio"] is None


def test_the_clock_stands_still(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    quality = scripts["quality"]
    now = [100.0]
    monkeypatch.setattr(quality.time, "perf_counter", lambda: now[0])
    clock = quality.Clock()
    now[0] += 2
    with clock.paused() as first:
        now[0] += 50
    now[0] += 1
    with clock.paused() as second:
        pass
    assert (first, second) == (2.0, 3.0)


def test_both_sides_on_a_table(
    scripts: Any,
    folders: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    quality = scripts["quality"]
    monkeypatch.setattr(quality, "OURS", SMALL)
    flags = ["--datasets", "tiny", "--seeds", "2", "--epochs", "3", "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", [str(BENCH / "quality.py"), *folders, *flags])
    assert quality.main() == 0
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["dataset"], row["seed"]) for row in rows] == [("tiny", 0), ("tiny", 1), ("tiny", "median of 2")]
    for row in rows:
        assert 0 < row["their s"] < 60
        assert 0.0 <= row["their val"] <= 1.0
        assert set(quality.NUMBERS) < set(row)
    assert rows[0]["their val"] != rows[1]["their val"], "each seed has its own split"
    assert "| tiny | median of 2 |" in capsys.readouterr().out


def test_ours_learns_within_the_limit(scripts: Any, folders: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    quality = scripts["quality"]
    monkeypatch.setattr(quality, "OURS", SMALL)
    parts, spec = quality.load_table(Path(folders[1]), "tiny", 0)
    config = quality.TrainConfig(max_epochs=12, lr=1e-2, metric="auc")
    run = quality.train_ours(parts, spec, config, 1e9)
    assert max(run.val) > 0.85
    assert len(run.seconds) == 12
    assert run.seconds == sorted(run.seconds)
    assert not quality.train_ours(parts, spec, config, 0.0).val, "no epoch fits into no time"


@pytest.mark.parametrize(
    ("module", "flags", "words"),
    [
        ("quality", ["--data", "nowhere"], ("--data", "nowhere/manifest.json")),
        ("quality", ["--datasets", "tony"], ("'tony'", "'tiny'")),
        ("quality", ["--reference", "nowhere"], ("--reference", "nowhere")),
        ("growth", ["--networks", "smal"], ("'smal'", "'small'")),
        ("growth", ["--plot", "x.gif"], ("--plot", "x.gif")),
    ],
)
def test_mistakes(
    scripts: Any, folders: list[str], module: str, flags: list[str], words: tuple[str, ...], monkeypatch: Any
) -> None:
    monkeypatch.setattr(sys, "argv", [module, *(folders if module == "quality" else []), *flags])
    with pytest.raises(UserError) as raised:
        scripts[module].main()
    assert all(word in str(raised.value) for word in words)
    assert "\n" not in str(raised.value)


def test_growth_of_tiny_tables(
    scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    growth = scripts["growth"]
    assert growth.exponent([1, 10, 100], [3.0, 30.0, 300.0]) == pytest.approx(1.0)
    assert growth.exponent([2, 4, 8], [1.0, 4.0, 16.0]) == pytest.approx(2.0)
    monkeypatch.setattr(growth, "SETTINGS", {"small": growth.Setting(SMALL, 32, 200, 64)})
    monkeypatch.setattr(growth, "ROWS", (100, 200, 400))
    monkeypatch.setattr(growth, "FEATURES", (2, 8))
    flags = ["--networks", "small", "--repeats", "2", "--plot", str(tmp_path / "g.svg"), "--json", str(tmp_path / "g")]
    monkeypatch.setattr(sys, "argv", [str(BENCH / "growth.py"), *flags])
    assert growth.main() == 0
    rows = json.loads((tmp_path / "g").read_text())["rows"]
    sizes = [(row["axis"], row["rows"], row["features"], row["epochs"]) for row in rows]
    assert sizes == [("rows", 100, 20, 2), ("rows", 200, 20, 2), ("features", 64, 2, 2), ("features", 64, 8, 2)]
    assert [row["exponent"] is None for row in rows] == [True, False, True, False]
    assert (tmp_path / "g.svg").read_text().count("<svg") == 1
    assert "small: 100 rows, 20 features" in capsys.readouterr().out
