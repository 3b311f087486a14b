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
    """A header and a line per row: numbers with four digits after the point, right-aligned."""
    if not rows:
        return "none"
    names = list(rows[0])
    lines = [names, *([cell(row[name]) for name in names] for row in rows)]
    right = [isinstance(next((r[n] for r in rows if r[n] != ""), ""), int | float) for n in names]
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if flag else text.ljust(width)
            for text, width, flag in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def cell(value: Any) -> str:
    """A value as text: ``0.9132``, ``12``, ``1.3e-11``, "" for none."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if value and abs(value) < 5e-5:
        return f"{value:.1e}"
    return f"{value:.4f}".removesuffix(".0000") if abs(value) < 1e4 else f"{value:.4g}"
