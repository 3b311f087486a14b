"""Model artifact in MLflow's format: loads in an empty folder, without pickle; its requirements.

Read from the sources, not kept as a list: a list would be forgotten when a model takes up a library.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import bishop_ray
from bishop_ray.models import MODELS

if TYPE_CHECKING:
    import pandas as pd

    from bishop_ray.predictor import Predictor


_ROOT = Path(bishop_ray.__file__).parent
_WITH_TORCH = {"triton"}
"""What builds of PyTorch for GPUs bring in the version they need, and the others do without."""
_BESIDE = {"bishop_ray.predictor.explanation"}
"""What a predictor can do beside predicting: explanations need scikit-learn, and import BiSHop."""


def requirements(model_names: Iterable[str]) -> list[str]:
    """Pinned pip requirements, sorted, of predictors with models of these names of the registry."""
    modules = ["bishop_ray.predictor.predictor"]
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


def save_pyfunc(
    predictor: Predictor, parts: Mapping[str, Path], target: Path, example: pd.DataFrame, model_id: str, run_id: str
) -> None:
    """Writes the MLflow model folder `target`.

    The signature names the columns with any type: MLflow's own check refuses an int64 column where it expects a
    double, and a category where it expects a string; the preprocessor reads all of these.

    Args:
        predictor: Its columns become the signature.
        parts: Folders that lie beside each other in it: ``predictor``, where that is saved, and ``gate``.
        target: Folder to create.
        example: Rows stored as input example, the used columns of them.
        model_id: Id of the logged model this becomes.
        run_id: Run that made it.
    """
    from mlflow.models import Model, ModelSignature
    from mlflow.pyfunc import save_model
    from mlflow.types import DataType, ParamSchema, ParamSpec, Schema
    from mlflow.types.schema import AnyType, ColSpec

    columns = [name for name, _ in predictor.schema]
    anything = AnyType()  # type: ignore[no-untyped-call]
    signature = ModelSignature(
        inputs=Schema([ColSpec(anything, name, required=False) for name in columns]),
        params=ParamSchema([ParamSpec("proba", DataType.boolean, False)]),
    )
    with _quiet():  # advice on integer columns and type hints; the signature above is deliberate
        save_model(
            target,
            python_model=str(Path(__file__).with_name("pyfunc_model.py")),
            artifacts={name: str(folder) for name, folder in parts.items()},
            code_paths=[str(_copy_package(target.with_name("bishop_ray")))],
            # Given, because MLflow would spend 4-10 s on finding out.
            pip_requirements=requirements(predictor.model_names),
            signature=signature,
            input_example=example[columns].reset_index(drop=True),
            mlflow_model=Model(model_id=model_id, model_uuid=model_id, run_id=run_id),
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("mlflow")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _copy_package(target: Path) -> Path:
    """The sources of this package, without compiled files."""
    source = Path(bishop_ray.__file__).parent
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "search_spaces", ".*"))
    return target
