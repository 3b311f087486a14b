"""Cases for the gate: sample rows and predictions stored beside a registered predictor.

Letters: R rows, K outputs.

``gate.json`` names the cases and files; ``rows.parquet``, ``missing.parquet``, ``unseen.parquet`` hold a few raw rows;
``outputs.npz`` what the training side's predictor said of each case; ``validation.npz`` target and predictions of the
validation rows. Nothing in it is pickled. Letters: R rows, K outputs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from bishop_ray.data.columns import canonical_text, to_numbers
from bishop_ray.data.target import Units
from bishop_ray.errors import UserError
from bishop_ray.metrics.bootstrap import Scored

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from bishop_ray.metrics.bootstrap import Scored
    from bishop_ray.predictor import Predictor


FOLDER = "gate"
"""Among the artifacts of a registered model, beside ``predictor``."""


@dataclass(frozen=True)
class Validation:
    """What the score that selected a model is made of.

    Attributes:
        key: Says which rows, so that two models of one key are compared row by row.
        scored: Target and predictions; of an ensemble those of weights that the row did not choose.
    """

    key: str
    scored: Scored


@dataclass(frozen=True)
class Evidence:
    """What a model is registered with.

    Attributes:
        frame: (R, features) raw rows that no test split holds, best of validation; some are kept.
        trained: (R, K) what the training process predicted for them, where that is known.
        on_gpu: That process may have used a GPU.
        validation: Predictions of the validation rows, where they are known.
    """

    frame: pd.DataFrame
    trained: NDArray[Any] | None = None
    on_gpu: bool = False
    validation: Validation | None = None


FACTS, OUTPUTS, VALIDATION = "gate.json", "outputs.npz", "validation.npz"
FORMAT = 1
ROWS = 64
"""Raw rows kept."""
MOST_PREDICTIONS = 20_000
"""Validation rows whose predictions are kept."""
TOLERANCE = 1e-5
"""Of a probability, or of the standardised target (there also relative): CPU against CPU."""
TRAINED_CPU, TRAINED_GPU = 1e-4, 2e-2
"""The same against what the training process itself said: another machine, other threads; a GPU, half precision."""
MOST_SECONDS = 1800.0
AS_TRAINED = "as trained"


@dataclass(frozen=True)
class Case:
    """Rows as a caller may bring them, and what the predictor must say of them.

    Attributes:
        name: For messages.
        file: Holds the rows.
        rows: How many of the first ones; all where negative.
        columns: Their order; as in the file where empty.
        tolerance: Largest difference allowed.
        error: Why the training side's own predictor could not predict them, or "".
    """

    name: str
    file: str
    rows: int = -1
    columns: list[str] = field(default_factory=list)
    tolerance: float = TOLERANCE
    error: str = ""

    def frame(self, folder: Path) -> pd.DataFrame:
        """The rows."""
        found: pd.DataFrame = pq.read_table(folder / self.file).to_pandas()
        found = found if self.rows < 0 else found.head(self.rows)
        return found[self.columns] if self.columns else found


def write_sample(folder: Path, predictor: Predictor, evidence: Evidence) -> None:
    """Fills the new `folder`."""
    folder.mkdir()
    picked = _some(len(evidence.frame), ROWS)
    rows = evidence.frame.iloc[picked][[name for name, _ in predictor.schema]].reset_index(drop=True)
    kinds = dict(predictor.schema)
    files = {"rows.parquet": rows, "missing.parquet": _with_missing(rows)}
    if "category" in kinds.values():
        files["unseen.parquet"] = _with_unseen(rows, kinds, predictor.levels)
    for name, frame in files.items():
        pq.write_table(_as_table(frame, kinds), folder / name)
    cases, outputs, begun = [], {}, time.monotonic()
    for i, case in enumerate(_cases(list(rows.columns), files)):
        try:
            outputs[str(i)] = np.asarray(predictor.output(case.frame(folder)), np.float64)
            cases.append(case)
        except Exception as error:  # of any library: such a model is registered too, and no alias points to it
            cases.append(Case(case.name, case.file, error=f"{type(error).__name__}: {error}"[:300]))
    seconds = time.monotonic() - begun
    if evidence.trained is not None:
        outputs[str(len(cases))] = np.asarray(evidence.trained[picked], np.float64)
        cases.append(Case(AS_TRAINED, "rows.parquet", tolerance=TRAINED_GPU if evidence.on_gpu else TRAINED_CPU))
    np.savez(folder / OUTPUTS, **outputs)  # type: ignore[arg-type]
    facts: dict[str, Any] = {"format": FORMAT, "cases": [vars(case) for case in cases], "validation": ""}
    facts["seconds"] = seconds
    if evidence.validation is not None:
        facts["validation"] = evidence.validation.key
        _write_validation(folder, evidence.validation.scored)
    (folder / FACTS).write_text(json.dumps(facts, indent=1), "utf-8")


def read_cases(folder: Path) -> Iterator[tuple[Case, NDArray[np.float64] | None]]:
    """The cases and what must be said of each; None where `Case.error` says that nothing could be.

    Raises:
        UserError: The folder is not there, damaged, or of a newer format.
    """
    try:
        facts = json.loads((folder / FACTS).read_text("utf-8"))
        if facts["format"] > FORMAT:
            raise UserError(f"its sample has format {facts['format']}; this version of bishop_ray reads {FORMAT}")
        with np.load(folder / OUTPUTS, allow_pickle=False) as outputs:
            for i, row in enumerate(facts["cases"]):
                case = Case(**row)
                yield case, None if case.error else np.asarray(outputs[str(i)], np.float64)
    except FileNotFoundError:
        raise UserError("it has no stored sample to be checked with") from None
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, OSError, EOFError) as error:
        raise UserError(f"its stored sample is damaged ({type(error).__name__})") from None


def seconds_of(folder: Path) -> float:
    """What predicting the cases took on the training side, half an hour at most; 0 where that cannot be read."""
    try:
        seconds = float(json.loads((folder / FACTS).read_text("utf-8"))["seconds"])
    except (LookupError, TypeError, ValueError, OSError):
        return 0.0
    return seconds if 0 < seconds <= MOST_SECONDS else MOST_SECONDS * (seconds > MOST_SECONDS)


def read_validation(folder: Path) -> Validation | None:
    """The stored predictions of validation rows; None where there are none.

    Raises:
        UserError: They are damaged.
    """
    if not (folder / VALIDATION).is_file() or not (folder / FACTS).is_file():
        return None
    try:
        key = str(json.loads((folder / FACTS).read_text("utf-8"))["validation"])
        with np.load(folder / VALIDATION, allow_pickle=False) as found:
            scored = Scored(found["y"], found["output"], _units(found))
    except (LookupError, TypeError, ValueError, OSError, EOFError) as error:
        raise UserError(f"its stored validation predictions are damaged ({type(error).__name__})") from None
    return Validation(key, scored)


def kept_rows(scored: Scored) -> Scored:
    """The rows of which predictions are kept: all, or a sample that depends on their number only."""
    rows = _some(len(scored), MOST_PREDICTIONS)
    return Scored(scored.y[rows], np.asarray(scored.output[rows], np.float32), scored.scale)


def _write_validation(folder: Path, scored: Scored) -> None:
    kept = kept_rows(scored)
    center = {"center": np.float64(kept.scale.center)} if isinstance(kept.scale, Units) else {}
    arrays = {"y": kept.y, "output": kept.output, "scale": np.float64(kept.scale), **center}
    np.savez_compressed(folder / VALIDATION, **arrays)  # type: ignore[arg-type]


def _units(found: Mapping[str, NDArray[Any]]) -> float:
    """Some metrics count from zero and need the target's centre; files of earlier versions lack it."""
    scale = float(found["scale"])
    return Units(scale, float(found["center"])) if "center" in found else scale


def _some(count: int, most: int) -> NDArray[np.int64]:
    """All positions, or a sorted sample of them."""
    if count <= most:
        return np.arange(count, dtype=np.int64)
    return np.sort(np.random.default_rng(0).choice(count, most, replace=False)).astype(np.int64)


def _cases(columns: list[str], files: dict[str, pd.DataFrame]) -> Iterator[Case]:
    yield Case("as they are", "rows.parquet")
    shuffled = [columns[i] for i in np.random.default_rng(1).permutation(len(columns))]
    # Two columns may come back in order, one always does: then the other way round.
    yield Case("columns shuffled", "rows.parquet", columns=shuffled if shuffled != columns else columns[::-1])
    yield Case("one row", "rows.parquet", rows=1)
    yield Case("no rows", "rows.parquet", rows=0)
    yield Case("a missing value in each column", "missing.parquet")
    if "unseen.parquet" in files:
        yield Case("an unseen category in each category column", "unseen.parquet")


def _with_missing(frame: pd.DataFrame) -> pd.DataFrame:
    """Column j lacks its value in row j, counted around."""
    given = np.ones(frame.shape, bool)
    if len(frame):
        given[np.arange(frame.shape[1]) % len(frame), np.arange(frame.shape[1])] = False
    columns = {name: frame[name].where(given[:, j]) for j, name in enumerate(frame.columns)}
    return pd.DataFrame(columns, index=frame.index)


def _with_unseen(frame: pd.DataFrame, kinds: dict[str, str], levels: dict[str, tuple[str, ...]]) -> pd.DataFrame:
    """Category column j, as text, has a level in row j, counted around, that training does not know."""
    frame = frame.copy()
    for j, name in enumerate(name for name in frame.columns if kinds[name] == "category"):
        values = _texts(frame[name])
        new = "unseen"
        while new in levels.get(name, ()):
            new += "_"
        if values:
            values[j % len(values)] = new
        frame[name] = pd.Series(values, index=frame.index, dtype=object)
    return frame


def _texts(series: pd.Series) -> list[str | None]:
    return [canonical_text(value) for value in series]


def _as_table(frame: pd.DataFrame, kinds: dict[str, str]) -> pa.Table:
    """As Parquet can hold it: columns of mixed types as the numbers or texts that they are read as."""
    plain = {}
    for name in frame.columns:
        series = frame[name]
        try:
            pa.Table.from_pandas(series.to_frame(name), preserve_index=False)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            numbers = kinds[name] == "number"
            series = pd.Series(to_numbers(series) if numbers else _texts(series), index=frame.index)
            series = series if numbers else series.astype(object)
        plain[name] = series
    return pa.Table.from_pandas(pd.DataFrame(plain, index=frame.index), preserve_index=False)
