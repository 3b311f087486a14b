"""What must be installed where a registered predictor predicts: found in the imports of its own sources.

Read from the sources, not kept as a list: a list would be forgotten when a model takes up a library.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import bishop_ray
from bishop_ray.models import MODELS

_ROOT = Path(bishop_ray.__file__).parent
_WITH_TORCH = {"triton"}
"""What builds of PyTorch for GPUs bring in the version they need, and the others do without."""

_BESIDE = {"bishop_ray.predictor.explanation"}
"""What a predictor can do beside predicting: explanations need scikit-learn, and import BiSHop."""


def requirements(model_names: Iterable[str]) -> list[str]:
    """Pinned pip requirements, sorted, of predictors with models of these names of the registry."""
    modules = ["bishop_ray.predictor.single"]
    libraries: set[str] = set()
    for name in model_names:
        modules.append(MODELS[name].path.partition(":")[0])
        libraries.update(MODELS[name].modules)
    libraries |= _outside(modules) - _WITH_TORCH
    homes = metadata.packages_distributions()
    distributions = {homes[library][0] for library in libraries if library in homes}
    # A local part such as 2.13.0+cpu is in no public index.
    return sorted(f"{name}=={metadata.version(name).partition('+')[0]}" for name in distributions)


def _outside(modules: list[str]) -> set[str]:
    """Top-level names of the libraries that these modules of ours, and those of ours they import, import."""
    waiting, seen, found = list(modules), set(modules), set()
    while waiting:
        for name in _imports(waiting.pop()):
            top = name.partition(".")[0]
            if top == "bishop_ray":
                # The package itself only says how to load a registered model.
                if name not in seen and name != top and not name.startswith(tuple(_BESIDE)):
                    seen.add(name)
                    waiting.append(name)
            elif top not in sys.stdlib_module_names:
                found.add(top)
    return found


@cache
def _imports(module: str) -> frozenset[str]:
    """Names of modules and of what is taken out of our own packages; none for a name that is no module."""
    path = _ROOT.joinpath(*module.split(".")[1:])
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return frozenset(_named(ast.parse(file.read_text("utf-8"))))
    return frozenset()


def _named(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield str(node.module)
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _named(child)
