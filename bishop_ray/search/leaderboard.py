"""Leaderboard: one row per dataset and model, as text, CSV and for MLflow."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bishop_ray.config import Skipped, StudyResult
from bishop_ray.metrics import display
from bishop_ray.paths import write_whole

if TYPE_CHECKING:
    from rich.table import Table as RichTable


def rows_csv(rows: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> str:
    """CSV of all rows with full precision; what a row lacks is empty. Columns are `names`, else as they appear."""
    text = io.StringIO()
    header = names or list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, header, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def rows_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A header and a line per row; numbers right-aligned, with the digits that their column needs, four at most."""
    if not rows:
        return "none"
    values = {name: [row[name] for row in rows] for name in rows[0]}
    texts = [[name, *_texts(column)] for name, column in values.items()]
    right = [isinstance(next((v for v in c if v not in ("", None)), ""), int | float) for c in values.values()]
    return columns(list(zip(*texts, strict=True)), right)


def columns(rows: Sequence[tuple[str, ...]], right: Sequence[bool] = ()) -> str:
    """Rows as aligned text; columns of which `right` says so end at the same place, the others begin there."""
    if not rows:
        return "none found"
    flags = right or [False] * len(rows[0])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if flag else cell.ljust(width)
            for cell, width, flag in zip(row, widths, flags, strict=True)
        ).rstrip()
        for row in rows
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


COLUMNS = (
    "dataset", "model", "metric", "validation", "test", "test_std", "linear", "mean", "trials", "early_stopped",
    "failed", "seconds", "fit_seconds", "predict_ms_per_1000_rows", "size_mb", "trained_on", "registered", "version",
    "note",
)  # fmt: skip


def leaderboard(results: Sequence[StudyResult], skipped: Sequence[Skipped] = ()) -> list[dict[str, Any]]:
    """Rows in the order of the datasets; scores in the metric's own sign, each on the rows its column names.

    ``validation`` is the winner's score in the search, for an ensemble the cross-fitted one; ``test`` the mean over the
    evaluation seeds; ``linear`` and ``mean`` are a linear model and the constant prediction on the same test rows.
    Models that were skipped follow, with the reason as ``note`` and nothing else.
    """
    empty: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    return [
        {
            "dataset": r.dataset,
            "model": r.model,
            "metric": r.metric,
            "validation": display(r.metric, r.val_score),
            "test": display(r.metric, r.test_mean),
            "test_std": r.test_std,
            "linear": display(r.metric, r.linear),
            "mean": display(r.metric, r.mean),
            "trials": sum(r.trials.values()),
            "early_stopped": r.trials.get("pruned", 0),
            "failed": r.trials.get("failed", 0),
            "seconds": round(r.seconds, 1),
            "fit_seconds": round(r.fit_seconds, 3),
            "predict_ms_per_1000_rows": round(r.predict_ms, 3),
            "size_mb": round(r.size_bytes / 1e6, 4),
            "trained_on": r.trained_on,
            "registered": r.registered,
            "version": r.version,
            "note": "champion" if r.champion else "",
        }
        for r in results
    ] + [{**empty, "dataset": s.dataset, "model": s.model, "note": f"skipped: {s.reason}"} for s in skipped]


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    """CSV with full precision."""
    return rows_csv(rows, COLUMNS)


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes the leaderboard; a reader sees the old file or the whole new one."""
    write_whole(path, to_csv(rows))


def as_table(rows: Sequence[dict[str, Any]]) -> RichTable:
    """The leaderboard for a terminal."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown = (
        "dataset", "model", "metric", "validation", "test", "linear", "mean", "trials", "time", "fit", "ms/1k rows",
        "MB", "registered",
    )  # fmt: skip
    for name in shown:
        table.add_column(name, justify="left" if name in ("dataset", "model", "metric", "registered") else "right",
                         no_wrap=name != "dataset")  # fmt: skip
    for row in rows:
        if not row["metric"]:  # skipped: the reason is printed below the table
            continue
        trials = f"{row['trials']} ({row['early_stopped']} early)" if row["early_stopped"] else str(row["trials"])
        trials += f", {row['failed']} failed" if row["failed"] else ""
        registered = f"{row['registered']} v{row['version']}" if row["version"] else row["registered"]
        table.add_row(
            row["dataset"],
            row["model"],
            row["metric"],
            _number(row["validation"]),
            _number(row["test"]) + (f" ±{row['test_std']:.4f}" if row["test_std"] else ""),
            _number(row["linear"]),
            _number(row["mean"]),
            trials if row["trials"] else "",
            clock(row["seconds"]) if row["trials"] else "",
            f"{row['fit_seconds']:.1f}s",
            f"{row['predict_ms_per_1000_rows']:.1f}",
            f"{row['size_mb']:.2f}",
            registered + (f" {row['note']}" if row["note"] else ""),
        )
    return table


def render(rows: Sequence[dict[str, Any]]) -> str:
    """The leaderboard as plain text, each row on one line however narrow the terminal is."""
    from rich.console import Console

    console = Console(width=400, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(as_table(rows))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def score_words(result: StudyResult) -> str:
    """The test score in words: ``auc 0.9934 ±0.0008 over 3 seeds``."""
    seeds = len(result.test_scores)
    spread = f" ±{result.test_std:.4f}" if seeds > 1 else ""
    return f"{result.metric} {_number(display(result.metric, result.test_mean))}{spread} over {seeds} seed(s)"


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1000 else f"{value:.4g}"


def clock(seconds: float) -> str:
    """``75`` -> ``1m15s``."""
    whole = int(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def refused(verdict: str) -> bool:
    """Whether a registered version got no alias, because its files do not answer as the trained model does."""
    return verdict.startswith("refused:")


def standing(champion: bool, verdict: str) -> str:
    """Whether a registered version is champion, and why not, in a few words."""
    if champion:
        return "also champion"
    if refused(verdict):
        return "models.py promote checks it again"
    if verdict.startswith("no: "):
        return f"an earlier version stays champion: {verdict.removeprefix('no: ')}"
    return "another version is champion by now"
