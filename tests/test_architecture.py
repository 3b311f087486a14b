"""The dependency rule and the one-home rule, read from the imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from private_touches import is_foreign, private_touches

ROOT = Path(__file__).resolve().parents[1]
ORDER = [
    "errors", "redact", "paths", "signals", "_compat", "paper.printed", "data", "metrics", "config", "models",
    "predictor", "training", "tracking", "registry", "search", "paper.ablations", "report", "paper", "serving", "cli",
    "sklearn", "jobs",
]  # fmt: skip
COMPAT = "bishop_ray/_compat/"
"""The one home of private parts: each library's are in the file of its name, where it may be imported too."""
HOMES = {
    "openml": ("bishop_ray/data/openml_client.py",),
    "torch": (
        "bishop_ray/models/",
        "bishop_ray/training/",
        "bishop_ray/predictor/",
        "bishop_ray/sklearn/",
        "bishop_ray/paper/retrieval.py",
        "jobs/bench/",
    ),
    "entmax": ("bishop_ray/models/bishop/", "jobs/bench/entmax.py"),
    "xgboost": ("bishop_ray/models/xgboost.py", "jobs/bench/"),
    "lightgbm": ("bishop_ray/models/lightgbm.py", "jobs/bench/wrappers.py"),
    "catboost": ("bishop_ray/models/catboost.py", "jobs/bench/wrappers.py"),
    "tabpfn": ("bishop_ray/models/tabpfn.py",),
    "tabicl": ("bishop_ray/models/tabicl.py",),
    "pytabkit": ("bishop_ray/models/realmlp.py",),
    "tabm": ("bishop_ray/models/tabm.py",),
    "rtdl_num_embeddings": ("bishop_ray/models/tabm.py",),
    "rtdl_revisiting_models": (
        "bishop_ray/models/mlp.py",
        "bishop_ray/models/resnet.py",
        "bishop_ray/models/ft_transformer.py",
    ),
    "pytorch_tabnet": ("bishop_ray/models/tabnet.py",),
    "tab_transformer_pytorch": ("bishop_ray/models/tab_transformer.py",),
    "sklearn": (
        "bishop_ray/data/files.py",
        "bishop_ray/models/sklearn_trees.py",
        "bishop_ray/models/random_forest.py",
        "bishop_ray/models/gbdt.py",
        "bishop_ray/metrics/__init__.py",
        "bishop_ray/metrics/scorers.py",
        "bishop_ray/predictor/explanation.py",
        "bishop_ray/training/baselines.py",
        "bishop_ray/search/importance.py",
        "bishop_ray/sklearn/",
        "jobs/bench/search.py",
    ),
    "scipy": ("bishop_ray/data/numeric.py", "bishop_ray/models/", "bishop_ray/paper/comparison.py"),
    "safetensors": ("bishop_ray/training/checkpoint.py", "bishop_ray/predictor/", "bishop_ray/models/"),
    "ray": (
        "bishop_ray/training/trainable.py",
        "bishop_ray/training/ray_train.py",
        "bishop_ray/search/",
        "bishop_ray/paper/ablations/run.py",
        "bishop_ray/serving/deployment.py",
        "bishop_ray/serving/service.py",
        "jobs/bench/memory.py",
        "jobs/bench/groups.py",
    ),
    "optuna": ("bishop_ray/search/", "jobs/bench/search.py"),
    "mlflow": ("bishop_ray/tracking/", "bishop_ray/registry/"),
    "plotly": ("bishop_ray/report/",),
    "fastapi": ("bishop_ray/serving/",),
    "argparse": ("bishop_ray/cli/", "jobs/"),
    "pickle": (),
    "cloudpickle": (),
    "joblib": (),
}


def sources() -> list[Path]:
    return [p for folder in ("bishop_ray", "jobs") for p in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def place(name: str) -> int | None:
    """Where a module stands: its package in the order, or itself where it stands apart from its package."""
    parts = name.split(".")[1:] if name.startswith("bishop_ray.") else []
    own = next((part for part in (".".join(parts[:2]), *parts[:1]) if part in ORDER), None)
    return None if own is None else ORDER.index(own)


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_rules(path: Path) -> None:
    where = str(path.relative_to(ROOT))
    own = ORDER.index("jobs") if where.startswith("jobs/") else place(".".join(Path(where).with_suffix("").parts))
    assert own is not None or where == "bishop_ray/__init__.py", f"{where} has no place in the order"
    for name in imports(path):
        target = place(name)
        if own is not None and target is not None:
            assert target <= own, f"{where} imports {name}, which stands to its right"
        top = name.split(".")[0]
        if top in HOMES:
            homes = HOMES[top] and (f"{COMPAT}{top}.py", *HOMES[top])
            assert any(where.startswith(home) for home in homes), f"{where} imports {top}; its home is {homes}"


def test_private_parts_of_libraries_are_touched_in_compat_alone() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in sources()}
    touches = list(private_touches(texts))
    outside = [touch for touch in touches if not touch.startswith(COMPAT)]
    assert not outside, "private parts of outside libraries, whose home is bishop_ray/_compat:\n" + "\n".join(outside)
    touched = {touch.partition(".py:")[0].removeprefix(COMPAT) for touch in touches}
    there = {path.stem for path in (ROOT / COMPAT).glob("*.py")} - {"__init__"}
    assert touched == there, "the reader finds what is there, library by library"


@pytest.mark.parametrize(
    ("text", "touch"),
    [
        ("from ray._private import services", "from ray._private import services"),
        ("import torch.utils._device as d", "import torch.utils._device"),
        ("from torch.overrides import _get_stack", "from torch.overrides import _get_stack"),
        ("from ray.tune.execution import class_cache", "from ray.tune.execution import class_cache"),
        ("import importlib\nr = importlib.import_module('ray._raylet')", "import ray._raylet"),
        ("import ray\nray._private.state.nodes()", "ray._private"),
        ("def f(trial):\n    return trial._trial_id", "trial._trial_id"),
        ("def f(openml):\n    openml._api_calls.requests = 1", "openml._api_calls"),
        ("def f(openml):\n    c = openml.calls\n    c.requests = 1", "openml.calls.requests is set"),
        ("import ray.util\nray.util.connect = print", "ray.util.connect is set"),
        ("import ray\nsetattr(ray.util, 'connect', print)", "setattr(ray.util, 'connect', print)"),
        ("def f(trial):\n    return getattr(trial, '_trial_id')", "getattr(trial, '_trial_id')"),
        ("from a import B\nclass C(B):\n    def f(self):\n        return self._lock", "self._lock"),
        ("from a import B\nclass C(B):\n    def _hook(self):\n        return 1", "C overrides _hook"),
        ("import a\nclass C(a.B):\n    pass\nclass D(C):\n    def _hook(self):\n        pass", "D overrides _hook"),
        ("from a import B\nclass C(B):\n    def _f(self):\n        return super()._f()", "super()._f"),
        ("import os\nos._exit(1)", ""),
        ("import ray\nray.__version__", ""),
        ("def f(openml):\n    openml.config.server = ''", ""),
        ("class C:\n    def f(self, other):\n        self._x = other._x", ""),
        ("import a\nclass C(a.B):\n    def f(self):\n        self._x = self._f()\n    def _f(self):\n        pass", ""),
        ("from a import B\nb = B()\nb.name = 1", ""),
    ],
)  # fmt: skip
def test_the_reader_of_private_touches(text: str, touch: str) -> None:
    found = [line.split(": ", 1)[1] for line in private_touches({"x.py": text})]
    assert touch in found if touch else not found, found


def test_compat_knows_one_library_per_file() -> None:
    for path in sorted((ROOT / COMPAT).glob("*.py")):
        foreign = {name.split(".")[0] for name in imports(path) if is_foreign(name)} - {"numpy"}
        assert foreign <= {path.stem}, f"{path.name} imports {foreign}: models must get torch's parts without Ray"


def test_models_and_loop_take_no_other_compat() -> None:
    allowed = {"bishop_ray._compat.torch", "bishop_ray._compat.sklearn"}
    for path in sources():
        where = str(path.relative_to(ROOT))
        if where.startswith("bishop_ray/models/") or where == "bishop_ray/training/loop.py":
            taken = {name for name in imports(path) if name.startswith("bishop_ray._compat")}
            assert all(any(f"{name}.".startswith(f"{one}.") for one in allowed) for name in taken), f"{where}: {taken}"


def test_models_and_loop_run_without_ray_and_mlflow() -> None:
    code = (
        "import sys, bishop_ray.training.loop, bishop_ray.models.bishop.model\n"
        "bad = {m.split('.')[0] for m in sys.modules} & {'ray', 'mlflow', 'optuna', 'openml'}\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("flag", ["--help", "--list-models", "--list-datasets", "--list-spaces", "--list-metrics"])
def test_lists_import_nothing_heavy(flag: str) -> None:
    # The names of metrics are scikit-learn's own.
    heavy = {"torch", "ray", "mlflow", "optuna", "openml"} | (set() if "metrics" in flag else {"sklearn", "scipy"})
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['jobs/tune.py', {flag!r}]\n"
        "try:\n    runpy.run_path('jobs/tune.py', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        f"bad = {{m.split('.')[0] for m in sys.modules}} & {heavy}\n"
        "sys.exit(f'imported {bad}' if bad else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "bishop" in result.stdout or flag in ("--list-datasets", "--list-metrics")
    assert result.stdout.strip()


def test_no_two_files_and_no_two_classes_share_a_name() -> None:
    """A name says where a thing is: files (beside ``__init__.py``) and public classes have one of their own."""
    files = [path for path in (ROOT / "bishop_ray").rglob("*.py") if path.name != "__init__.py"]
    classes = [
        node.name
        for path in (ROOT / "bishop_ray").rglob("*.py")
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    for names in ([path.name for path in files], classes):
        assert not {name for name in names if names.count(name) > 1}


def test_files_have_at_most_400_lines_and_the_root_few_modules() -> None:
    """One concept per file; the package's root holds what everything else stands on."""
    lines = {path: path.read_text("utf-8").count("\n") for path in (ROOT / "bishop_ray").rglob("*.py")}
    assert not {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > 400}
    assert len(list((ROOT / "bishop_ray").glob("*.py"))) <= 7
