"""The tables of a report as Markdown and CSV."""

from __future__ import annotations

from collections.abc import Sequence

from bishop_ray.reporting.page import Section, texts
from bishop_ray.reporting.records import Table


def markdown(title: str, facts: Sequence[str], sections: Sequence[Section]) -> str:
    """Headings, tables and notes; figures are named with their captions, since they are in the HTML page."""
    lines = [f"# {_plain(title)}", "", *(f"{_plain(fact)}  " for fact in facts), ""]
    for section in sections:
        lines += [f"## {_plain(section.title)}", "", *(f"{_plain(text)}\n" for text in section.paragraphs)]
        for table in section.tables:
            lines += [] if table.title == section.title else [f"### {_plain(table.title)}", ""]
            lines += [*_table(table), "", *(f"- {_plain(note)}" for note in table.notes), ""]
        if section.figures:
            lines += ["Figures in report.html:", ""]
            lines += [f"- *{_plain(figure.title)}.* {_plain(figure.caption)}" for figure in section.figures]
            lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def csv(table: Table) -> str:
    """The table with full precision."""
    text: str = table.frame.to_csv(index=False, lineterminator="\n")
    return text


def _table(table: Table) -> list[str]:
    columns = [str(column) for column in table.frame.columns]
    rule = ["---:" if table.frame[column].dtype.kind in "iuf" else "---" for column in table.frame.columns]
    return [_line(columns), f"| {' | '.join(rule)} |", *(_line(row) for row in texts(table))]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_plain(cell) for cell in cells)} |"


def _plain(text: str) -> str:
    """Text that stays text: no tags, no columns, no emphasis out of names."""
    for sign in ("\\", "|", "*", "_", "`"):
        text = text.replace(sign, f"\\{sign}")
    return text.replace("<", "&lt;").replace("\n", " ")
