"""The README and the pages beside the code: their commands parse, what they name exists, their links resolve."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from bishop_ray import cli
from bishop_ray.cli import ablate, doctor, report, reproduce, serve, theory, train
from bishop_ray.cli import models as models_cli
from bishop_ray.models import MODELS
from bishop_ray.paper.ablations.settings import ABLATIONS, chosen
from bishop_ray.search.plan import one_source

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 200
"""Lines of the README; whatever is longer has a page beside the code."""
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "tune": cli.tune_parser,
    "train": train.train_parser,
    "models": models_cli.models_parser,
    "report": report.report_parser,
    "ablate": ablate.ablate_parser,
    "theory": theory.theory_parser,
    "reproduce": reproduce.reproduce_parser,
    "doctor": doctor.doctor_parser,
    "serve": serve.serve_parser,
    "predict": serve.predict_parser,
}
EXAMPLES = {"bishop_ray/models/x.py", "search_spaces/X.yaml", "search_spaces/x.yaml", "tests/models/test_x.py"}
"""Files of a recipe, which nobody has yet."""


def pages() -> dict[str, str]:
    """Every README of the repository and the pages of .github, by path."""
    tops = [path for path in sorted(ROOT.iterdir()) if path.is_dir() and not path.name.startswith(".")]
    nested = [page for top in tops for page in sorted(top.rglob("README.md"))]
    found = [ROOT / "README.md", *nested, *sorted((ROOT / ".github").glob("*.md"))]
    return {page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in found}


PAGES = pages()
TEXT = "\n".join(PAGES.values())


def blocks(text: str, language: str) -> list[str]:
    """Fenced blocks of a language, those within a list too, without their indentation."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", text, flags=re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


LINES = [
    line.split("#")[0].strip()
    for block in blocks(TEXT, "bash")
    for line in block.splitlines()
    if line.split("#")[0].strip()
]


def section(page: str, heading: str) -> str:
    """What stands below a heading of the second level."""
    return PAGES[page].split(f"\n## {heading}\n")[1].split("\n## ")[0]


def lines_of(job: str) -> list[str]:
    return [line for line in LINES if f"jobs/{job}.py" in line]


def parsed(job: str, line: str) -> argparse.Namespace:
    words = shlex.split(line)
    return PARSERS[job]().parse_args(words[words.index(f"jobs/{job}.py") + 1 :])


def test_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= LONGEST


@pytest.mark.parametrize("line", lines_of("tune"))
def test_tune_lines_parse(line: str) -> None:
    args = parsed("tune", line)
    assert args.list_models or one_source(args) in ("suite", "task", "table", "dataset")
    assert set(args.models) <= {*MODELS, "all"}


@pytest.mark.parametrize("line", lines_of("models"))
def test_models_lines_parse(line: str) -> None:
    args = parsed("models", line)
    assert args.action in ("list", "promote", "rollback", "ensemble", "sync", "explain", "replay")


@pytest.mark.parametrize("line", lines_of("ablate"))
def test_ablate_lines_parse(line: str) -> None:
    args = parsed("ablate", line)
    assert one_source(args) in ("suite", "task", "table", "dataset")
    chosen(args.name, args.models, args.settings)


@pytest.mark.parametrize("line", lines_of("theory"))
def test_theory_lines_parse(line: str) -> None:
    assert parsed("theory", line).patterns


def test_every_ablation_and_setting_is_named() -> None:
    named = set(re.findall(r"`([a-z0-9_]+)`", section("bishop_ray/paper/README.md", "Ablations")))
    settings = {s.name for name in ABLATIONS if name not in ("depth", "sparsity") for s in chosen(name, (), ())}
    assert named >= settings | set(ABLATIONS) | {"all", "random_10", "increasing_", "decreasing_"}


@pytest.mark.parametrize("line", lines_of("report"))
def test_report_lines_parse(line: str) -> None:
    args = parsed("report", line)
    assert args.studies or args.experiment or args.paper_table


@pytest.mark.parametrize("line", lines_of("serve"))
def test_serve_lines_parse(line: str) -> None:
    assert parsed("serve", line).name


@pytest.mark.parametrize("line", lines_of("predict"))
def test_predict_lines_parse(line: str) -> None:
    assert parsed("predict", line).name


@pytest.mark.parametrize("line", lines_of("train"))
def test_train_lines_parse(line: str) -> None:
    args = parsed("train", line)
    assert one_source(args) in ("table", "dataset")
    assert args.model in MODELS


@pytest.mark.parametrize("line", lines_of("reproduce"))
def test_reproduce_lines_parse(line: str) -> None:
    from bishop_ray.paper import printed

    args = parsed("reproduce", line)
    assert reproduce.chosen_datasets(printed.table(int(args.paper_table)), args.dataset)
    assert set(args.models) <= set(MODELS)


@pytest.mark.parametrize("line", lines_of("doctor"))
def test_doctor_lines_parse(line: str) -> None:
    args = parsed("doctor", line)
    assert args.table or args.dataset
    assert set(args.models) <= {*MODELS, "all"}


def test_every_model_is_named() -> None:
    assert set(re.findall(r"`([a-z0-9_]+)`", section("jobs/README.md", "All models"))) >= set(MODELS)


def test_variables_they_name_are_read() -> None:
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
    assert commands == ['cd "$(dirname "$0")/.."', "make test-all"]


def test_the_workflow_runs_the_test_commands_and_nothing_else() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    runs = {name: [s["run"] for s in job["steps"] if "run" in s] for name, job in workflow["jobs"].items()}
    assert runs == {"test": ["make test"], "test-all": ["make test-all"]}


@pytest.mark.parametrize("block", blocks(TEXT, "python"))
def test_python_blocks_compile(block: str) -> None:
    compile(block, "page", "exec")


def test_messages_they_explain_are_said() -> None:
    rows = re.findall(r"^\| (`.*`) \| ", section("jobs/README.md", "By message"), flags=re.MULTILINE)
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


def test_files_they_name_exist() -> None:
    named = set(re.findall(r"`((?:bishop_ray|jobs|search_spaces|tests|deploy)/[\w./-]*)`", TEXT)) - EXAMPLES
    assert len(named) > 5
    for name in named:
        assert (ROOT / name).exists(), name


def anchors(text: str) -> set[str]:
    """What headings are called in links, as GitHub makes it of their words."""
    outside = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", outside, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_resolve(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text("utf-8")), link


def options(parser: argparse.ArgumentParser) -> set[str]:
    """Flags of a parser, those of its actions included."""
    found: set[str] = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                found |= options(below)
    return found


def test_flags_they_name_exist() -> None:
    flags = set(re.findall(r"`(--[a-z-]+)", TEXT))
    known = {option for parser in PARSERS.values() for option in options(parser())}
    assert flags
    assert flags <= known | {"--working-dir", "--runtime-env-json"}, flags - known
