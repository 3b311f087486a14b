"""HTML and Markdown pages of a report."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from plotly.offline import get_plotlyjs

from bishop_ray.paper.printed import importance
from bishop_ray.report.ablation_section import ablation_figures, ablation_table
from bishop_ray.report.figures import WIDTH, Figure, best_over_time, best_over_trials, layers, parallel, survival
from bishop_ray.report.outcome_figures import importance_bars, outcome_figures, study_importance
from bishop_ray.report.study_records import AblationRecords, ReportTable, Study
from bishop_ray.report.tables import (
    ABOUT,
    by_dataset,
    cost_table,
    importance_table,
    notes,
    optimism_table,
    ranks_table,
    results_table,
)
from bishop_ray.search.importance import Importance, average


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


def csv(table: ReportTable) -> str:
    """The table with full precision."""
    text: str = table.frame.to_csv(index=False, lineterminator="\n")
    return text


def _table(table: ReportTable) -> list[str]:
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


@dataclass(frozen=True)
class Section:
    """A part of the report: title, paragraphs, tables and figures."""

    title: str
    paragraphs: tuple[str, ...] = ()
    tables: tuple[ReportTable, ...] = ()
    figures: tuple[Figure, ...] = ()


STYLE = f"""
body {{ font: 14px/1.5 system-ui, sans-serif; color: #222 }}
body {{ margin: 0 auto; max-width: {2 * WIDTH + 60}px; padding: 16px }}
h1 {{ font-size: 24px; margin: 8px 0 }}
h2 {{ font-size: 19px; border-bottom: 1px solid #bbb; margin: 32px 0 10px; padding-bottom: 3px }}
h3 {{ font-size: 15px; margin: 14px 0 4px }}
.facts {{ color: #555 }}
nav ul {{ columns: 3; padding-left: 18px; margin: 6px 0 }}
.scroll {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; margin: 4px 0 }}
th {{ text-align: left; border-bottom: 2px solid #888; padding: 3px 10px 3px 0; vertical-align: bottom }}
td {{ border-bottom: 1px solid #e3e3e3; padding: 2px 10px 2px 0 }}
th.number, td.number {{ text-align: right; white-space: nowrap }}
.notes {{ color: #444; font-size: 12.5px; max-width: 900px; padding-left: 18px; margin: 4px 0 14px }}
.figures {{ display: flex; flex-wrap: wrap; gap: 8px 20px }}
figure {{ margin: 0; width: {WIDTH}px }}
figure h3 {{ min-height: 1.5em }}
figcaption {{ color: #444; font-size: 12.5px; margin: 2px 0 10px }}
@page {{ size: A4; margin: 14mm 13mm }}
@media print {{
  body {{ padding: 0; max-width: none; font-size: 12px }}
  nav {{ display: none }}
  .scroll {{ overflow: visible }}
  table {{ font-size: 10px }}
  th, td {{ padding-right: 6px }}
  thead {{ display: table-header-group }}
  tr, figure {{ break-inside: avoid }}
  h2, h3 {{ break-after: avoid }}
  .figures {{ display: block }}
}}
"""
SCRIPT = """
"use strict";
(function () {
  // One figure after the other, so that the page can be read at once; printing draws what is left.
  const waiting = Array.from(document.querySelectorAll("script.figure"));
  function draw() {
    const source = waiting.shift();
    if (!source) { document.documentElement.dataset.drawn = "all"; return false; }
    const figure = JSON.parse(source.textContent);
    Plotly.newPlot(source.dataset.target, figure.data, figure.layout, {displayModeBar: false, responsive: false});
    return true;
  }
  function next() { if (draw()) { setTimeout(next, 0); } }
  window.addEventListener("beforeprint", function () { while (draw()) { } });
  next();
})();
"""
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Of the page: nothing is loaded from anywhere (https://www.w3.org/TR/CSP3/)."""


def page(title: str, facts: Sequence[str], sections: Sequence[Section]) -> str:
    """The whole page.

    Args:
        title: Its heading.
        facts: Lines below it.
        sections: In their order.
    """
    body = "".join(_section(i, section) for i, section in enumerate(sections))
    links = "".join(f'<li><a href="#s{i}">{html.escape(s.title)}</a></li>' for i, s in enumerate(sections))
    lines = "<br>".join(html.escape(fact) for fact in facts)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>\n<script>{get_plotlyjs()}</script></head>\n<body>"
        f'<h1>{html.escape(title)}</h1><p class="facts">{lines}</p><nav><ul>{links}</ul></nav>\n'
        f"{body}<script>{SCRIPT}</script></body></html>\n"
    )


def _section(number: int, section: Section) -> str:
    parts = [f'<section id="s{number}"><h2>{html.escape(section.title)}</h2>']
    parts += [f"<p>{html.escape(text)}</p>" for text in section.paragraphs]
    parts += [_html_table(table, heading=table.title != section.title) for table in section.tables]
    if section.figures:
        parts.append(f'<div class="figures">{"".join(_figure(figure) for figure in section.figures)}</div>')
    return "".join(parts) + "</section>\n"


def _figure(figure: Figure) -> str:
    height = int(figure.plot.layout.height)
    return (
        f'<figure><h3>{html.escape(figure.title)}</h3><div id="{figure.name}" class="plot" role="img" '
        f'aria-label="{html.escape(figure.title)}" style="height:{height}px"></div>'
        f"<figcaption>{html.escape(figure.caption)}</figcaption>"
        f'<script type="application/json" class="figure" data-target="{figure.name}">{figure.json()}</script></figure>'
    )


def _html_table(table: ReportTable, heading: bool) -> str:
    classes = [' class="number"' if _is_number(table, column) else "" for column in table.frame.columns]
    head = "".join(f"<th{c}>{html.escape(str(n))}</th>" for c, n in zip(classes, table.frame.columns, strict=True))
    rows = "".join(
        "<tr>" + "".join(f"<td{c}>{_breakable(v)}</td>" for c, v in zip(classes, row, strict=True)) + "</tr>"
        for row in texts(table)
    )
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in table.notes)
    title = f"<h3>{html.escape(table.title)}</h3>" if heading else ""
    return f'{title}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>' + (
        f'<ul class="notes">{notes}</ul>' if notes else ""
    )


def _breakable(text: str) -> str:
    """Escaped, with places where a long name may go on in the next line."""
    return re.sub(r"([_-])(?=\w{2})", r"\1<wbr>", html.escape(text))


def _is_number(table: ReportTable, column: str) -> bool:
    return bool(table.frame[column].dtype.kind in "iuf")


def texts(table: ReportTable) -> list[list[str]]:
    """The cells as people read them."""
    rows = table.frame.itertuples(index=False, name=None)
    columns = list(table.frame.columns)
    return [[cell(v, table.digits.get(str(n))) for n, v in zip(columns, row, strict=True)] for row in rows]


def cell(value: Any, digits: int | None) -> str:
    """A value with its decimals; a dash for a missing one."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return "–"
        return f"{value:.{digits}f}" if digits is not None else f"{value:g}"
    return str(value)


def contents(
    studies: Sequence[Study], runs: Sequence[AblationRecords], found: Mapping[str, Importance]
) -> list[Section]:
    """The sections; one that would be empty is left out.

    Args:
        studies: Sorted by dataset and model.
        runs: Of ablations.
        found: Study -> its importances.
    """
    sections: list[Section] = []
    if studies:
        sections.append(Section("Results", tables=(results_table(studies),)))
        sections += [Section(t.title, tables=(t,)) for t in (ranks_table(studies), cost_table(studies)) if t]
        if optimism := optimism_table(studies):
            sections.append(Section("Optimism", tables=(optimism,)))
        sections += _importance(studies, found)
    if table := ablation_table(runs):
        sections.append(Section("Ablations", tables=(table,), figures=tuple(ablation_figures(runs))))
    for dataset, own in by_dataset(studies).items():
        figures = [best_over_trials(dataset, own), best_over_time(dataset, own), survival(dataset, own)]
        for study in own:
            figures += _figures(study, found[study.name])
        sections.append(Section(f"Searches on {dataset}", figures=tuple(f for f in figures if f)))
    return sections


def _figures(study: Study, found: Importance) -> list[Figure | None]:
    return [
        parallel(study),
        study_importance(study, found),
        layers(study, "alpha"),
        layers(study, "nonzero"),
        *outcome_figures(study),
    ]


def _importance(studies: Sequence[Study], found: Mapping[str, Importance]) -> list[Section]:
    """A table per model, and for BiSHop the averages beside the paper's figures."""
    tables: list[ReportTable] = []
    figures: list[Figure] = []
    without: list[str] = []
    for model in dict.fromkeys(study.model for study in studies):
        own = [study for study in studies if study.model == model]
        by_dataset: dict[str, dict[str, Importance]] = {}
        for study in own:
            by_dataset.setdefault(study.dataset, {})[study.name] = found[study.name]
        if table := importance_table(model, by_dataset):
            tables.append(table)
        else:
            without += notes(by_dataset)
        usable = [found[study.name] for study in own if found[study.name].forest]
        if model == "bishop" and usable:
            shares = {
                "random forest": average([one.forest for one in usable]),
                "fANOVA": average([one.fanova for one in usable]),
                "paper (random forest)": importance()["average"],
            }
            figures.append(importance_bars("average", model, shares))
    return [Section("Importance of hyperparameters", (ABOUT, *without), tuple(tables), tuple(figures))]
