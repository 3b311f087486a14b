"""Names, lengths and numbers that MLflow accepts. Imports no mlflow."""

from __future__ import annotations

import hashlib
import math
import posixpath
import re
from collections.abc import Mapping
from typing import Any

from bishop_ray.data.refs import path_part

MAX_KEY = 250
MAX_PARAM = 6000
MAX_TAG = 8000
_FORBIDDEN = re.compile(r"[^\w.\- :/]")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def safe_key(name: str) -> str:
    """`name` as MLflow accepts it as metric or parameter; unchanged when it already does.

    A changed name ends with four letters of its hash, so that two names never become one.
    """
    cleaned = _FORBIDDEN.sub("_", name)
    if cleaned != posixpath.normpath(cleaned) or cleaned.startswith(("/", "..")) or cleaned == ".":
        cleaned = re.sub(r"/+", "/", cleaned).strip("/.") or "_"  # it would name another file as a path
        cleaned = cleaned.replace("./", "_/").replace("/.", "/_")
    if cleaned == name and len(name) <= MAX_KEY:
        return name
    steps = [re.sub(r"\s*_+\s*", "_", step).strip("_ ") for step in cleaned.split("/")]
    cleaned = "/".join(step for step in steps if step.strip(".")) or "_"
    return f"{cleaned[: MAX_KEY - 5]}-{_digest(name)[:4]}"


def safe_file_name(name: str) -> str:
    """`name` as one path component: no separators, never hidden, never empty, of `path_part`'s length.

    A changed name ends with eight letters of its hash, so that two names never become one.
    """
    cleaned = path_part(name)
    return name if cleaned == name else f"{cleaned.removesuffix(f'-{_digest(name)[:8]}')}-{_digest(name)[:8]}"


def clean(text: str) -> str:
    """`text` without what PostgreSQL cannot store: zero bytes and halves of characters become U+FFFD."""
    return text.replace("\0", "\ufffd").encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def finite_metrics(metrics: Mapping[str, Any]) -> tuple[dict[str, float], list[str]]:
    """The finite values as floats by name, and the names of the others."""
    finite: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            continue
        if math.isfinite(number):
            finite[name] = number
    return finite, [name for name in metrics if name not in finite]


def split_params(params: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Parameters as short texts by safe name, and the full text of those too long for MLflow (as artifacts).

    A long value is recorded as ``sha256:...`` with its length.
    """
    short: dict[str, str] = {}
    long: dict[str, str] = {}
    for name, value in params.items():
        key, text = safe_key(str(name)), clean(str(value))
        if len(text) > MAX_PARAM:
            long[f"long_params/{safe_file_name(str(name))}.txt"] = text
            text = f"sha256:{_digest(text)} ({len(text)} characters, see artifact long_params)"
        short[key] = text
    return short, long


def short_tags(tags: Mapping[str, Any]) -> dict[str, str]:
    """Tags as texts within MLflow's limits; a longer text is cut and marked."""
    return {
        safe_key(str(name)): text if len(text := clean(str(value))) <= MAX_TAG else f"{text[: MAX_TAG - 5]} ..."
        for name, value in tags.items()
    }


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted names: ``{"model": {"d": 8}}`` -> ``{"model.d": 8}``."""
    flat: dict[str, Any] = {}
    for name, value in params.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{key}.")
        else:
            flat[key] = value
    return flat
