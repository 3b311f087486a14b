"""Names of columns that are a mistake, or that read differently elsewhere."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Hashable, Sequence

from bishop_ray.data.findings import NOTED, REFUSED, Finding, listed, shown

_UNNAMED = re.compile(r"Unnamed: \d+(_level_\d+)?")
"""What pandas makes of an empty cell in a header line."""
_SPECIAL = set('[]{}":,<>')
"""Characters that some libraries and formats refuse in a name; ours never see names."""


def name_findings(columns: Sequence[Hashable]) -> list[Finding]:
    """Duplicate, empty, odd and look-alike names, one finding per kind.

    Args:
        columns: Names of all columns, the target's among them; of any type, as a data frame has them.
    """
    names = [str(column) for column in columns]
    found: list[Finding] = []
    for name in dict.fromkeys(n for n in names if names.count(n) > 1) if len(set(names)) < len(names) else ():
        found.append(Finding("duplicate name", shown(name), f"{names.count(name)} columns have this name", REFUSED))
    empty = [n for n in dict.fromkeys(names) if not n.strip() or _UNNAMED.fullmatch(n)]
    odd = {n: why for n in dict.fromkeys(names) if n not in empty and (why := _odd(n))}
    other = [n for n, column in zip(names, columns, strict=True) if not isinstance(column, str)]
    unicode = [n for n in dict.fromkeys(names) if not n.isascii()]
    if empty:
        found.append(Finding("empty name", listed(empty), "no name in the header; an index that was saved?", NOTED))
    for why in dict.fromkeys(odd.values()):
        found.append(Finding("odd name", listed(n for n in odd if odd[n] == why), why, NOTED))
    if other:
        found.append(Finding("odd name", listed(other), "the name is no text; it is read as its text", NOTED))
    if unicode:
        found.append(Finding("unicode name", listed(unicode), _unicode(unicode), NOTED))
    return found + _similar(list(dict.fromkeys(names)))


def _odd(name: str) -> str:
    if name != name.strip():
        return "blanks around the name, which belong to it"
    if not name.isprintable():
        return "characters that cannot be seen"
    return "characters with a meaning in JSON or CSV" if _SPECIAL & set(name) else ""


def _unicode(names: Sequence[str]) -> str:
    loose = [name for name in names if unicodedata.normalize("NFC", name) != name]
    if loose:
        return f"letters outside ASCII; {listed(loose)}: not composed (NFC), so that equal-looking text is not equal"
    return "letters outside ASCII"


def _similar(names: Sequence[str]) -> list[Finding]:
    """Names that differ in case, blanks or the way their letters are composed only."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(unicodedata.normalize("NFKC", name).casefold().strip(), []).append(name)
    return [
        Finding("similar names", ", ".join(map(repr, group[:5])), "they differ, but hardly look so", NOTED)
        for group in groups.values()
        if len(group) > 1
    ]
