"""Request and response schemas of a service, and their OpenAPI document."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd

from bishop_ray.data.columns import to_numbers
from bishop_ray.errors import UserError
from bishop_ray.predictor import Predictor, label_texts

MAX_ROWS = 10_000
"""Rows of one request; ``jobs/predict.py`` is for more."""
EXAMPLE = "2024-01-31T12:30:00Z"
"""A moment as clients write it; the other forms that training reads are taken too."""
MAX_FAULTS = 100
"""Faults that a reply names."""
RequestSchema = Sequence[tuple[str, str]]
Rows = list[dict[str, Any]]
Fault = dict[str, Any]


class RequestRefused(Exception):
    """A request that cannot be answered.

    Args:
        status: HTTP status, 4xx.
        detail: A line, or the faults of a body that is JSON.
    """

    def __init__(self, status: int, detail: str | list[Fault]) -> None:
        super().__init__(str(detail))
        self.status, self.detail = status, detail


def read_rows(body: bytes, schema: RequestSchema) -> Rows:
    """The rows of a request, each with the model's columns alone.

    Args:
        body: UTF-8 JSON: ``{"rows": [{"column": value, ...}, ...]}``.
        schema: Columns and their kinds, see `Predictor.schema`.

    Raises:
        RequestRefused: 400, no JSON; 422, JSON of another shape, or values that are not what the columns hold.
    """
    given = _rows(_parse(body))
    names = [name for name, _ in schema]
    faults = list(islice(_faults(given, schema), MAX_FAULTS))
    if faults:
        raise RequestRefused(422, faults)
    return [{name: row[name] for name in names} for row in given]


def make_frame(rows: Rows, schema: RequestSchema) -> pd.DataFrame:
    """Rows that were checked as (R, columns); numbers as float64, all else as it came."""
    columns: dict[str, Any] = {}
    for name, kind in schema:
        values = [row[name] for row in rows]
        # None becomes NaN; texts stay objects, since pandas' own ones cannot hold half of a surrogate pair.
        columns[name] = np.array(values, np.float64) if kind == "number" else pd.Series(values, dtype=object)
    return pd.DataFrame(columns, index=range(len(rows)))


def fault(place: Sequence[str | int], message: str, kind: str) -> Fault:
    """One entry of a 422 reply, in FastAPI's own form."""
    return {"loc": ["body", *place], "msg": message, "type": kind}


def _parse(body: bytes) -> Any:
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError:
        raise RequestRefused(400, "body: expected JSON in UTF-8; found other bytes") from None
    except RecursionError:
        raise RequestRefused(400, "body: expected rows; found JSON that is nested without end") from None
    except ValueError as error:
        raise RequestRefused(400, f"body: expected JSON; found {' '.join(str(error).split())[:200]}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name}, which JSON does not have; write null for a missing value")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name that comes twice in one object")
    return made


def _rows(value: Any) -> list[Any]:
    if not isinstance(value, dict):
        raise RequestRefused(422, [fault([], f"expected an object with rows; found {_kind(value)}", "type")])
    strange = [name for name in value if name != "rows"]
    faults = [fault([name[:60]], "expected no field beside rows", "extra") for name in strange[:MAX_FAULTS]]
    rows = value.get("rows")
    if "rows" not in value:
        faults.append(fault(["rows"], "missing", "missing"))
    elif not isinstance(rows, list):
        faults.append(fault(["rows"], f"expected a list of rows; found {_kind(rows)}", "type"))
    elif not 1 <= len(rows) <= MAX_ROWS:
        faults.append(fault(["rows"], f"expected 1 to {MAX_ROWS} rows; found {len(rows)}", "length"))
    if faults or not isinstance(rows, list):
        raise RequestRefused(422, faults)
    return rows


def _faults(rows: list[Any], schema: RequestSchema) -> Iterator[Fault]:
    """What is wrong, row by row; columns of dates are read as a whole first, since that is faster."""
    checks: dict[str, Callable[[Any], str]] = {}
    for name, kind in schema:
        if kind == "moment":
            values = [row.get(name) for row in rows if isinstance(row, dict)]
            checks[name] = _moment if _bad_moments(values) else _nothing
        else:
            checks[name] = _number if kind == "number" else _category
    for number, row in enumerate(rows):
        if isinstance(row, dict):
            yield from _row_faults(number, row, checks)
        else:
            yield fault(["rows", number], f"expected an object; found {_kind(row)}", "type")


def _row_faults(number: int, row: Mapping[str, Any], checks: Mapping[str, Callable[[Any], str]]) -> Iterator[Fault]:
    for name, check in checks.items():
        if name not in row:
            yield fault(["rows", number, name], "missing; null is a missing value", "missing")
        elif row[name] is not None and (wrong := check(row[name])):
            yield fault(["rows", number, name], wrong, "value")


def _nothing(value: Any) -> str:
    return ""


def _number(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and _finite(value):
        return ""
    return f"expected a number or null; found {_kind(value)}"


def _category(value: Any) -> str:
    if isinstance(value, str | bool) or (isinstance(value, int | float) and _finite(value)):
        return ""
    return f"expected a text, number, boolean or null; found {_kind(value)}"


def _moment(value: Any) -> str:
    return f"expected a date or time such as {EXAMPLE}, or null; found {_kind(value)}" if _bad_moments([value]) else ""


def _bad_moments(values: list[Any]) -> bool:
    """Whether one of them is no text that training would have read as a point in time."""
    known = [value for value in values if value is not None]
    if not all(isinstance(value, str) for value in known):
        return True
    try:
        to_numbers(pd.Series(known, dtype=object, name="moment"), moment=True)
    except UserError:
        return True
    return False


def _finite(value: float) -> bool:
    """Whether it is a number that float64 has."""
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _kind(value: Any) -> str:
    """A value in a message: short, and no more of it than needed."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int | float) and not _finite(value):
        return "a number beyond float64"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


Json = dict[str, Any]
SHOWN_LEVELS = 50
"""Levels of a category column that are shown; any other text is allowed too."""
_LARGEST = 1.7976931348623157e308
_VALUES: dict[str, Json] = {
    "number": {"type": ["number", "null"], "minimum": -_LARGEST, "maximum": _LARGEST},
    "moment": {
        "anyOf": [
            {"type": "string", "format": "date-time", "examples": [EXAMPLE]},
            {"type": "string", "format": "date"},
            {"type": "null"},
        ]
    },
    "category": {
        "type": ["string", "number", "boolean", "null"],
        "minimum": -_LARGEST,
        "maximum": _LARGEST,
    },
}
_SAYS = {
    "number": "a number; null is a missing value",
    "moment": "a date or time, ISO 8601, UTC where it names no zone; null is a missing value",
    "category": "a category; one that training never saw is allowed, null is a missing value",
}


def columns(predictor: Predictor) -> list[Json]:
    """Name and kind of every column, and of categories the first `SHOWN_LEVELS` levels."""
    levels = predictor.levels
    return [
        {"name": name, "kind": kind} | ({"levels": list(levels[name][:SHOWN_LEVELS])} if name in levels else {})
        for name, kind in predictor.schema
    ]


def description(predictor: Predictor) -> Json:
    """What ``GET /schema`` says of a model beside its name and version."""
    return {
        "task": predictor.task.value,
        "target": predictor.target.name,
        "labels": list(label_texts(predictor)),
        "columns": columns(predictor),
    }


def request_schema(predictor: Predictor) -> Json:
    """Of the body of ``POST /predict``."""
    properties = {}
    for name, kind in predictor.schema:
        known = kind if kind in _VALUES else "category"
        properties[name] = _VALUES[known] | {"description": _SAYS[known]}
    row = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": True,
        "description": "One row; further columns are ignored.",
    }
    rows = {"type": "array", "items": row, "minItems": 1, "maxItems": MAX_ROWS}
    return {"type": "object", "properties": {"rows": rows}, "required": ["rows"], "additionalProperties": False}


def reply_schema(predictor: Predictor) -> Json:
    """Of the reply to ``POST /predict``."""
    labels = label_texts(predictor)
    chance: Json = {"type": "null"}
    value: Json = {"type": "number"}
    if labels:
        one = {"type": "number", "minimum": 0, "maximum": 1 + 1e-6}
        of_row = {"type": "object", "properties": dict.fromkeys(labels, one), "required": list(labels)}
        chance = {"type": "array", "items": of_row}
        value = {"enum": list(predictor.target.classes)}
    properties = {
        "predictions": {"type": "array", "items": value},
        "probabilities": chance,
        "model": {"type": "string"},
        "version": {"type": "integer"},
    }
    return {"type": "object", "properties": properties, "required": list(properties)}


def problems(**said: str) -> dict[int | str, Json]:
    """Replies that are no success, as FastAPI takes them: ``s401="..."``, ..."""
    line: Json = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}
    entry = {
        "type": "object",
        "properties": {
            "loc": {"type": "array", "items": {"type": ["string", "integer"]}},
            "msg": {"type": "string"},
            "type": {"type": "string"},
        },
        "required": ["loc", "msg", "type"],
    }
    faults: Json = {
        "type": "object",
        "properties": {"detail": {"type": "array", "items": entry}},
        "required": ["detail"],
    }
    found: dict[int | str, Json] = {}
    for status, text in said.items():
        number = int(status[1:])
        found[number] = {
            "description": text,
            "content": {"application/json": {"schema": faults if number == 422 else line}},
        }
    return found
