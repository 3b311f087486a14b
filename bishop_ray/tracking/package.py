"""A predictor in MLflow's model format: loads in an empty folder, without this package installed, without pickle."""

from __future__ import annotations

import contextlib
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import bishop_ray
from bishop_ray.tracking.requirements import requirements

if TYPE_CHECKING:
    import pandas as pd

    from bishop_ray.predictor import Predictor


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
            python_model=str(Path(__file__).with_name("serve_model.py")),
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
