"""From a name to tensors: references, sources, splits, preprocessing. Importing it loads nothing heavy."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "DatasetFacts": "refs",
    "DatasetRef": "refs",
    "embedded_ref": "refs",
    "file_ref": "refs",
    "list_datasets": "refs",
    "suite_id": "refs",
    "task_ref": "refs",
    "load_dataset": "load",
    "paper_dataset": "load",
    "suite_datasets": "load",
    "task_dataset": "load",
    "SplitProtocol": "split",
    "protocol": "split",
    "split_dataset": "split",
    "Preprocessor": "preprocess",
    "RawDataset": "table",
    "Split": "table",
    "Table": "table",
    "TableSpec": "table",
    "TaskType": "table",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
