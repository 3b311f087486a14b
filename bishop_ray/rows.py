"""Rows of plain values as text: CSV with full precision, and aligned columns for a terminal. Imports nothing heavy."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any


def rows_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """CSV of all rows; columns in order of appearance, what a row lacks is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def rows_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A header and a line per row; numbers right-aligned, with the digits that their column needs, four at most."""
    if not rows:
        return "none"
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    texts = [[name, *_texts(values)] for name, values in columns.items()]
    widths = [max(map(len, column)) for column in texts]
    right = [isinstance(next((v for v in c if v not in ("", None)), ""), int | float) for c in columns.values()]
    return "\n".join(
        "  ".join(
            text.rjust(width) if flag else text.ljust(width)
            for text, width, flag in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in zip(*texts, strict=True)
    )


def _texts(values: Sequence[Any]) -> list[str]:
    """The values of a column: ``0.9132``, ``1.5``, ``1.3e-11``, "" for none."""
    plain = [f"{v:.4f}".rstrip("0") for v in values if isinstance(v, float)]
    digits = max((len(text.partition(".")[2]) for text in plain), default=0)
    return [_text(value, digits) for value in values]


def _text(value: Any, digits: int) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if value and abs(value) < 5e-5:
        return f"{value:.1e}"
    return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.4g}"
