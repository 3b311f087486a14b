"""What benchmarks share: sides in turn, tables and JSON, and how a checkout of other code is loaded."""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bishop_ray.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def script(name: str) -> Any:
    """A module of the benchmarks' folder, which is on the path only for scripts in it."""
    sys.path.insert(0, str(ROOT / "jobs" / "bench"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "jobs" / "bench"))


@pytest.fixture(scope="module")
def harness() -> Any:
    return script("harness")


@pytest.fixture(scope="module")
def reference() -> Any:
    return script("reference")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Code laid out as the authors' release: modules that import each other as ``models.…``."""
    folder = tmp_path / "release" / "models"
    folder.mkdir(parents=True)
    (folder / "layers.py").write_text("WIDTH = 3\n")
    (folder / "model.py").write_text(
        "import torch\nfrom models.layers import WIDTH\n"
        "class BiSHop(torch.nn.Module):\n"
        "    def __init__(self, n_cat, n_num, n_out, d_model, **rest):\n"
        "        super().__init__()\n"
        "        self.rest = rest\n"
        "        self.map = torch.nn.Linear(n_num, n_out)\n"
        "        self.width = WIDTH * d_model\n"
        "    def forward(self, x_cat, x_num):\n"
        "        return self.map(x_num)\n"
    )
    return folder.parent


def test_sides_take_turns_and_none_is_always_first(harness: Any) -> None:
    calls: list[str] = []
    sides = {name: (lambda name=name: calls.append(name)) for name in "abc"}
    times = harness.interleave(sides, 3, CPU, warm_up=1, inner=2)
    assert "".join(calls) == "ccbbaaaabbccccbbaaaabbcc"
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3, "c": 3}
    assert harness.medians({"a": [1.0, 9.0, 2.0]}) == {"a": 2.0}
    assert harness.ratio(6.0, 2.0) == 3.0
    assert harness.ratio(None, 2.0) is None


def test_a_table_and_its_file(harness: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(json=tmp_path / "x.json")
    harness.publish([{"side": "ours", "ms": 1.23456}, {"side": "theirs", "ratio": None}], args, CPU)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["| side | ms | ratio |", "| --- | --- | --- |", "| ours | 1.235 | - |", "| theirs | - | - |"]
    document = json.loads(args.json.read_text())
    assert sorted(document) == ["command", "machine", "rows", "versions"]
    assert document["rows"][0]["ms"] == 1.23456
    assert document["versions"]["torch"] == torch.__version__


def test_other_code_neither_shadows_nor_stays(
    reference: Any, checkout: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine = type(sys)("models")
    monkeypatch.setitem(sys.modules, "models", mine)
    (tmp_path / "models.py").write_text("raise AssertionError('a namesake was imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    path = list(sys.path)
    release = reference.load_reference(checkout)
    assert sys.modules["models"] is mine
    assert "models.layers" not in sys.modules
    assert sys.path == path
    network = release.build(0, 2, 2, CPU, d_model=7)
    assert network.width == 21
    assert network.rest["emb_dim"] == 32


def test_the_step_of_the_authors(reference: Any, checkout: Path) -> None:
    torch.manual_seed(0)
    network = reference.load_reference(checkout).build(0, 2, 2, CPU)
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
    x_num = torch.randn(64, 2)
    batch = (torch.zeros(64, 0, dtype=torch.int64), x_num, (x_num[:, 0] > 0).long())
    losses = [reference.authors_step(network, optimizer, batch) for _ in range(20)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "models/model.py"),
        ("import not_there\n", "not_there"),
        ("x = 1\n", "class BiSHop"),
    ],
)
def test_a_wrong_checkout(reference: Any, checkout: Path, source: str | None, words: str) -> None:
    model = checkout / "models" / "model.py"
    model.unlink() if source is None else model.write_text(source)
    with pytest.raises(UserError, match=words) as caught:
        reference.load_reference(checkout)
    assert str(caught.value).startswith("--reference: ")
    assert "\n" not in str(caught.value)
    assert "models.model" not in sys.modules


def test_runs_without_the_libraries_of_the_platform() -> None:
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'jobs' / 'bench')!r})\n"
        "import harness, reference, bishop_ray.models.bishop, bishop_ray.training.optimizer\n"
        "import importlib.util\n"
        "assert 'site-packages' in importlib.util.find_spec('entmax').origin\n"
        "bad = {m.split('.')[0] for m in sys.modules} & "
        "{'ray', 'mlflow', 'optuna', 'openml', 'sklearn', 'pandas', 'scipy', 'safetensors', 'entmax', 'yaml'}\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_peak_of_a_step(harness: Any) -> None:
    network = torch.nn.Linear(256, 256, bias=False)
    optimizer = torch.optim.Adam(network.parameters())
    x = torch.randn(4096, 256)
    weight, activation = 256 * 256 * 4, 4096 * 256 * 4

    def step() -> None:
        optimizer.zero_grad()
        network(x).relu().sum().backward()
        optimizer.step()

    step()
    held, above = harness.peak_memory(step, network, optimizer, CPU)
    assert 3 * weight <= held - above <= 3 * weight + 64, "weights and two moments"
    # Both activations, or one with the gradient of the other, are alive together, and no third.
    assert 2 * activation <= above < 2 * activation + 3 * weight
