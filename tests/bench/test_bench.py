"""The comparison of default configurations, run as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def defaults(*flags: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "jobs" / "bench" / "defaults.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def test_a_table_of_models_against_a_linear_one(tmp_path: Path) -> None:
    done = defaults("--dataset", "diabetes", "--models", "random_forest,mlp", "--max-epochs", "2", cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines] == ["| model", "| random_forest", "| mlp"]
    cells = [cell.strip() for cell in lines[1].strip("|").split("|")]
    validation, test, linear, gap = (float(cell.removesuffix(" below the bar")) for cell in cells[1:5])
    assert gap == pytest.approx(test - linear, abs=0.011)
    assert 20 < linear < 80
    assert 10 < validation < 80
    assert "below the bar" in lines[2], "two epochs are not enough: the bar can be missed"
    assert done.returncode == 1
    assert "diabetes: regression, 10 features, rows 309/88/45, 100 x r2" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), ("--table", "none")),
        (("--dataset", "iris", "--models", "mpl"), ("mpl", "'mlp'")),
        (("--dataset", "irs"), ("irs", "'iris'")),
        (("--table", "a.csv"), ("--target", "0 for 1")),
        (("--folder", "nowhere"), ("nowhere/manifest.json", "no such file")),
        (("--dataset", "iris", "--max-rows", "0"), ("--max-rows",)),
        (("--dataset", "iris", "--space", "mlp"), ("MODEL=SPACE", "'mlp'")),
    ],
)
def test_mistakes_are_one_line(flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    done = defaults(*flags)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert all(word in last for word in words), done.stderr
    assert "Traceback" not in done.stderr
