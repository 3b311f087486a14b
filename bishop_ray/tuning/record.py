"""A study's settings as text in MLflow, and back: all that a training of one of its trials can be repeated from."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from bishop_ray.config import StudyConfig
from bishop_ray.data.split import SplitProtocol
from bishop_ray.errors import UserError

RECORD = "bishop.config"
"""Tag of a study's own run."""

_LOCAL = ("storage", "tracking_uri", "study_db", "fresh", "doctor")
"""What says where a study runs or how it is begun: no business of who repeats a trial, and an address may be secret."""


def config_text(config: StudyConfig) -> str:
    """The settings as JSON, without addresses; a file's place is among them."""
    names = [field.name for field in fields(StudyConfig) if field.name not in _LOCAL]
    return json.dumps({name: value for name, value in asdict(config).items() if name in names})


def read_config(text: str) -> StudyConfig:
    """The inverse of `config_text`; what it leaves out has its default.

    Raises:
        UserError: The text is none of `config_text`, or of a version that knows more settings.
    """
    try:
        values = json.loads(text)
        found = _build(StudyConfig, values)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"tag {RECORD}: damaged ({type(error).__name__})") from None
    assert isinstance(found, StudyConfig)
    return found


def _build(kind: type, values: dict[str, Any]) -> Any:
    hints = get_type_hints(kind, localns={"SplitProtocol": SplitProtocol})
    if unknown := values.keys() - {field.name for field in fields(kind)}:
        raise UserError(f"tag {RECORD}: written by a newer version: this one knows no {min(unknown)!r}")
    return kind(**{name: _value(hints[name], value) for name, value in values.items()})


def _value(hint: Any, value: Any) -> Any:
    """What JSON made of a value, as its field has it."""
    nested = next((option for option in (hint, *get_args(hint)) if is_dataclass(option)), None)
    if isinstance(nested, type) and isinstance(value, dict):
        return _build(nested, value)
    return tuple(value) if isinstance(value, list) else value
