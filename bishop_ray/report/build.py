"""From a selection to the files of a report."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bishop_ray.errors import UserError
from bishop_ray.paper.printed import table
from bishop_ray.paths import write_whole
from bishop_ray.report.ablation_section import collect_ablations, read_ablations
from bishop_ray.report.collect import Selection, collect_studies
from bishop_ray.report.paper_section import paper_dataset
from bishop_ray.report.study_records import AblationRecords, ReportTable, Study
from bishop_ray.search.importance import Importance, Observed, importance_of
from bishop_ray.tracking.naming import safe_file_name
from bishop_ray.tracking.query import Reader

REPORTS = "reports"
"""Experiment of a report whose studies lie in several."""


@dataclass(frozen=True)
class Written:
    """A report that was written.

    Attributes:
        folder: Holds ``report.html``, ``report.md`` and a CSV file per table.
        tables: Shown.
        figures: Drawn.
        run_id: The MLflow run that has the files too.
    """

    folder: Path
    tables: tuple[ReportTable, ...]
    figures: int
    run_id: str


def make_report(
    selection: Selection,
    *,
    storage: Path,
    uri: str = "",
    output: Path | None = None,
    ablations: Sequence[Path] = (),
    study_db: str = "",
) -> Written:
    """Reads, writes the files, and logs them to MLflow: to the study's run, or a run of their own in the experiment.

    Args:
        selection: What is reported.
        storage: Where studies are kept; read where MLflow lacks trials.
        uri: MLflow address, see `tracking_uri`.
        output: Folder of the files, by default ``STORAGE/reports/NAME``.
        ablations: CSV files of ``jobs/ablate.py``, for the runs that MLflow lacks.
        study_db: Database of the studies that are not kept in `storage`, read where MLflow lacks trials.

    Raises:
        UserError: Bad input, or nothing to report; nothing was written.
    """
    if importlib.util.find_spec("plotly") is None:
        raise UserError("a report needs plotly, which is not installed: pip install 'bishop-ray[report]'")
    from bishop_ray.report.page import contents, csv, markdown, page

    given = [run for path in ablations for run in read_ablations(path)]
    reader = Reader(uri)
    studies = collect_studies(reader, selection, storage, study_db)
    told, others = collect_ablations(reader, selection.place(reader), {study.dataset for study in studies})
    runs = list({run.key: run for run in (*given, *told)}.values())  # of a run that both have MLflow's, with its curves
    if not studies and not runs:
        raise UserError(f"{_asked(selection)}: expected studies or ablations; found none in {reader.shown}")
    found = {study.name: importances(study) for study in studies}
    sections = contents(studies, runs, found)
    title, facts = _title(selection), _facts(studies, runs, others, reader) + _missing(selection, studies)
    tables = tuple(table for section in sections for table in section.tables)
    folder = output or storage / "reports" / safe_file_name(selection.name)
    files = {"report.html": page(title, facts, sections), "report.md": markdown(title, facts, sections)}
    files |= {f"{safe_file_name(table.name)}.csv": csv(table) for table in tables}
    _write(folder, files)
    run_id = _log(reader, selection, studies, [folder / name for name in files])
    return Written(folder, tables, sum(len(section.figures) for section in sections), run_id)


def importances(study: Study) -> Importance:
    """Of a study's hyperparameters."""
    space = {k.removeprefix("space."): v for k, v in study.params.items() if k.startswith("space.")}
    return importance_of([Observed(trial.params, trial.score) for trial in study.trials], space)


def _asked(selection: Selection) -> str:
    if selection.paper_table:
        where = f" in experiment {selection.experiment}" if selection.experiment else ""
        return f"--paper-table {selection.paper_table}{where}"
    return f"--experiment {selection.experiment}" if selection.experiment else " ".join(selection.studies)


def _title(selection: Selection) -> str:
    if selection.paper_table:
        return f"The paper's table {selection.paper_table}, run again"
    others = len(selection.studies) - 1
    return f"Report: {selection.studies[0]} and {others} more" if others > 0 else f"Report: {selection.name}"


def _facts(studies: Sequence[Study], runs: Sequence[AblationRecords], others: int, reader: Reader) -> list[str]:
    trials = sum(len(study.trials) for study in studies)
    counts = [f"{len(studies)} studies, {trials} trials"] if studies else []
    counts += [f"{len(runs)} ablation runs"] if runs else []
    if others:
        counts.append(f"{others} older ablation runs of other configurations left out")
    made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    versions = sorted({s.tags["version.bishop_ray"] for s in studies if "version.bishop_ray" in s.tags})
    processors = sorted({s.tags["processor"] for s in studies if s.tags.get("processor")})
    facts = [", ".join(counts), f"made {made} from {reader.shown}"]
    if versions:
        facts.append(f"bishop_ray {', '.join(versions)} on {', '.join(processors) or 'unknown processors'}")
    return facts


def _missing(selection: Selection, studies: Sequence[Study]) -> list[str]:
    """Which datasets of a table of the paper have no evaluated study."""
    if not selection.paper_table:
        return []
    found = table(selection.paper_table)
    there = {paper_dataset(found, study.dataset) for study in studies if study.scores}
    missing = [f"{found.name(d)} ({d})" if found.suite(d) else d for d in found.datasets if d not in there]
    return [f"{len(there)} of the table's {len(found.datasets)} datasets; none of: {', '.join(missing) or '-'}"]


def _write(folder: Path, files: dict[str, str]) -> None:
    try:
        for name, text in files.items():
            write_whole(folder / name, text)
    except OSError as error:
        raise UserError(f"--output: cannot write {folder}: {error.strerror or error}") from None


def _log(reader: Reader, selection: Selection, studies: Sequence[Study], files: list[Path]) -> str:
    if len(selection.studies) == 1 and len(studies) == 1:
        return reader.log_report(files, run_id=studies[0].run_id)
    used = {study.experiment for study in studies}
    experiment = selection.experiment or (used.pop() if len(used) == 1 else REPORTS)
    return reader.log_report(files, experiment=experiment, name=selection.name)
