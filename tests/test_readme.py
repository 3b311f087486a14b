"""The README's commands parse, and what it names exists."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from pathlib import Path

import pytest

from bishop_ray import cli
from bishop_ray.cli import ablate, doctor, report, reproduce, serve, theory, train
from bishop_ray.cli import models as models_cli
from bishop_ray.models import MODELS
from bishop_ray.paper.ablations.settings import ABLATIONS, chosen

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", TEXT, flags=re.DOTALL)
LINES = [line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("line", [line for line in LINES if "jobs/tune.py" in line])
def test_tune_lines_parse(line: str) -> None:
    words = shlex.split(line)
    args = cli.tune_parser().parse_args(words[words.index("jobs/tune.py") + 1 :])
    assert args.list_models or cli.one_source(args) in ("suite", "task", "table", "dataset")
    assert set(args.models) <= {*MODELS, "all"}


@pytest.mark.parametrize("line", [line for line in LINES if "jobs/models.py" in line])
def test_models_lines_parse(line: str) -> None:
    words = shlex.split(line)
    args = models_cli.models_parser().parse_args(words[words.index("jobs/models.py") + 1 :])
    assert args.action in ("list", "promote", "rollback", "ensemble", "sync", "explain", "replay")


@pytest.mark.parametrize("line", [line for line in LINES if "jobs/ablate.py" in line])
def test_ablate_lines_parse(line: str) -> None:
    words = shlex.split(line)
    args = ablate.ablate_parser().parse_args(words[words.index("jobs/ablate.py") + 1 :])
    assert cli.one_source(args) in ("suite", "task", "table", "dataset")
    chosen(args.name, args.models, args.settings)


@pytest.mark.parametrize("line", [line for line in LINES if "jobs/theory.py" in line])
def test_theory_lines_parse(line: str) -> None:
    words = shlex.split(line)
    assert theory.theory_parser().parse_args(words[words.index("jobs/theory.py") + 1 :]).patterns


def test_every_ablation_and_setting_is_named() -> None:
    named = set(re.findall(r"`([a-z0-9_]+)`", TEXT.split("## Ablations")[1].split("\n## ")[0]))
    settings = {s.name for name in ABLATIONS if name not in ("depth", "sparsity") for s in chosen(name, (), ())}
    assert named >= settings | set(ABLATIONS) | {"all", "random_10", "increasing_", "decreasing_"}


@pytest.mark.parametrize("line", [line for line in LINES if "jobs/report.py" in line])
def test_report_lines_parse(line: str) -> None:
    words = shlex.split(line)
    args = report.report_parser().parse_args(words[words.index("jobs/report.py") + 1 :])
    assert args.studies or args.experiment or args.paper_table


@pytest.mark.parametrize("line", [line for line in LINES if "jobs/serve.py" in line or "jobs/predict.py" in line])
def test_serving_lines_parse(line: str) -> None:
    job, *words = shlex.split(line)[1:]
    parser = serve.serve_parser() if job == "jobs/serve.py" else serve.predict_parser()
    assert parser.parse_args(words).name


@pytest.mark.parametrize("line", [line for line in LINES if "jobs/train.py" in line])
def test_train_lines_parse(line: str) -> None:
    words = shlex.split(line)
    args = train.train_parser().parse_args(words[words.index("jobs/train.py") + 1 :])
    assert cli.one_source(args) in ("table", "dataset")
    assert args.model in MODELS


@pytest.mark.parametrize("line", [line for line in LINES if "jobs/reproduce.py" in line])
def test_reproduce_lines_parse(line: str) -> None:
    from bishop_ray.paper import printed

    words = shlex.split(line)
    args = reproduce.reproduce_parser().parse_args(words[words.index("jobs/reproduce.py") + 1 :])
    assert reproduce.chosen_datasets(printed.table(int(args.paper_table)), args.dataset)
    assert set(args.models) <= set(MODELS)


@pytest.mark.parametrize("line", [line for line in LINES if "jobs/doctor.py" in line])
def test_doctor_lines_parse(line: str) -> None:
    words = shlex.split(line)
    args = doctor.doctor_parser().parse_args(words[words.index("jobs/doctor.py") + 1 :])
    assert args.table or args.dataset
    assert set(args.models) <= {*MODELS, "all"}


def test_every_model_is_named() -> None:
    section = TEXT.split("## All models")[1].split("\n## ")[0]
    assert set(re.findall(r"`([a-z0-9_]+)`", section)) >= set(MODELS)


def test_variables_it_names_are_read() -> None:
    code = "".join(path.read_text("utf-8") for path in (ROOT / "bishop_ray").rglob("*.py"))
    for name in set(re.findall(r"`(BISHOP_[A-Z_]+)`", TEXT)):
        assert f'"{name}"' in code, name


@pytest.mark.parametrize("line", [line for line in LINES if line.startswith("make ")])
def test_make_targets_exist(line: str) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in line.split("&&")[0].split()[1:]:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_ci_runs_the_test_command_and_nothing_else() -> None:
    commands = [
        x for x in (ROOT / ".ci" / "run").read_text("utf-8").splitlines() if x and not x.startswith(("#", "set "))
    ]
    assert commands == ['cd "$(dirname "$0")/.."', "make test"]


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL))
def test_python_blocks_compile(block: str) -> None:
    compile(block, "README.md", "exec")


def test_messages_it_explains_are_said() -> None:
    rows = re.findall(r"^\| (`.*`) \| ", TEXT.split("## By message")[1].split("\n## ")[0], flags=re.MULTILINE)
    explained = [text for row in rows for text in re.findall(r"`(.+?)`", row)]
    said = [
        node.value
        for path in (ROOT / "bishop_ray").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert len(explained) > 15
    for text in explained:
        assert any(text in words for words in said), text


def test_files_it_names_exist() -> None:
    named = set(re.findall(r"`((?:bishop_ray|jobs|search_spaces)/[\w./]*)`", TEXT)) - {
        "bishop_ray/models/x.py", "search_spaces/X.yaml", "search_spaces/x.yaml",
    }  # fmt: skip
    assert len(named) > 5
    for name in named:
        assert (ROOT / name).exists(), name


def parsers() -> list[argparse.ArgumentParser]:
    """All parsers, those of a job's actions included."""
    models = models_cli.models_parser()
    actions = next(a for a in models._actions if isinstance(a, argparse._SubParsersAction))
    return [
        cli.tune_parser(),
        train.train_parser(),
        report.report_parser(),
        ablate.ablate_parser(),
        theory.theory_parser(),
        doctor.doctor_parser(),
        serve.serve_parser(),
        serve.predict_parser(),
        *actions.choices.values(),
    ]


def test_flags_it_names_exist() -> None:
    flags = set(re.findall(r"`(--[a-z-]+)", TEXT))
    known = {option for parser in parsers() for action in parser._actions for option in action.option_strings}
    assert flags
    assert flags <= known | {"--working-dir", "--runtime-env-json"}, flags - known
