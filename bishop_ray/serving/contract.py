"""What a service promises, as JSON Schema: the model's own columns, replies and errors, for its OpenAPI document."""

from __future__ import annotations

from typing import Any

from bishop_ray.predictor import Predictor, label_texts
from bishop_ray.serving.payload import EXAMPLE, MAX_ROWS

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
