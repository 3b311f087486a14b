"""From a name to tensors: references, sources, splits, preprocessing. Importing it loads nothing heavy."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "DatasetFacts": "suites",
    "DatasetRef": "suites",
    "embedded_ref": "suites",
    "file_ref": "suites",
    "list_datasets": "suites",
    "suite_id": "suites",
    "task_ref": "suites",
    "load_dataset": "sources",
    "paper_dataset": "sources",
    "suite_datasets": "sources",
    "task_dataset": "sources",
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
