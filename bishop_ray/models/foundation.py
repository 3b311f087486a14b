"""Estimator base of in-context (foundation) models.

Nothing is trained: a pretrained network sees the context and the rows asked about, and answers. What is saved is the
context and a hash of the weights; loading needs the same weights on that machine (``models/checkpoints.py``).
"""

from __future__ import annotations

import json
import warnings
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from bishop_ray.data.table import Table, TableSpec
from bishop_ray.errors import TrainingFailed, UserError
from bishop_ray.models.base import Array, Estimator
from bishop_ray.models.checkpoints import Checkpoint, digest, find_weights, offline, torch_threads
from bishop_ray.models.validation import check_whole

CONTEXT, MANIFEST, FORMAT = "context.safetensors", "context.json", 1
_ROWS = 4096
"""Rows asked about at a time: bounds the memory of a prediction."""
_STEP = 64
"""Requests are filled up to a multiple of these rows: products of other shapes round otherwise, and where a package
undoes a transform of the target the last bits of a row would depend on how many others there are."""


class InContextModel(Estimator):
    """A pretrained network that reads training rows as its context.

    Attributes:
        n_context: Training rows read, at most; more are thinned evenly within classes, by the seed.
        n_estimators: Permutations of columns and classes that predictions are averaged over.
    """

    package: ClassVar[str]
    """Name of the library."""
    variable: ClassVar[str]
    """Environment variable that names the weights."""

    def __init__(self, spec: TableSpec, n_context: int, n_estimators: int) -> None:
        check_whole(1, n_context=n_context, n_estimators=n_estimators)
        self.spec, self.n_context, self.n_estimators = spec, n_context, n_estimators
        self._context: tuple[Array, NDArray[Any]] = (np.zeros((0, spec.n_num + spec.n_cat), np.float32), np.zeros(0))
        self._weights: Checkpoint | None = None
        self._model: Any = None

    @classmethod
    def cannot(cls, spec: TableSpec, rows: int) -> str:
        """The reason is absent weights, or weights that cannot do the task or so many classes."""
        try:
            cls.weights(spec)
        except UserError as error:
            return str(error)
        return ""

    @classmethod
    def weights(cls, spec: TableSpec) -> Checkpoint:
        """The checkpoint on this machine for such a table.

        Raises:
            UserError: There is none.
        """
        kind = "classifier" if spec.task.is_classification else "regressor"
        return find_weights(cls.variable, cls.folders(), kind, lambda found: cls.unfit(found, spec), cls.package)

    @classmethod
    @abstractmethod
    def folders(cls) -> list[Path]:
        """Where the package keeps its downloads."""

    @classmethod
    @abstractmethod
    def unfit(cls, checkpoint: Checkpoint, spec: TableSpec) -> str:
        """Why a checkpoint cannot do the task, as the end of a sentence, or ""."""

    @abstractmethod
    def start(self, weights: Path, x: Array, y: NDArray[Any]) -> Any:
        """The package's model with its context: (R, N + C) inputs, (R,) targets."""

    @abstractmethod
    def inputs(self, x_num: Array, x_cat: NDArray[np.int64]) -> Array:
        """(R, N) numbers, (R, C) codes -> (R, N + C) float32 as the package reads them."""

    def fit(self, train: Table, val: Table, on_round: Callable[[int, Array], bool]) -> None:
        """Takes the context from `train`.

        Raises:
            TrainingFailed: A class without a row, or the package refuses the context.
        """
        self.refit(train, 1)

    def refit(self, train: Table, rounds: int) -> None:
        """Takes the context from `train`; there are no rounds."""
        if self.spec.task.is_classification and (found := len(np.unique(train.y))) < self.spec.n_out:
            raise TrainingFailed(f"every class needs a training row; found {found} of {self.spec.n_out} classes")
        rows = context_rows(train.y, self.n_context, self.spec.task.is_classification, self.seed)
        self._context = self.inputs(train.x_num[rows], train.x_cat[rows]), train.y[rows]
        self._weights = self.weights(self.spec)
        self._start()

    def predict(self, x_num: Array, x_cat: NDArray[np.int64]) -> Array:
        """Class probabilities (R, K), or the standardised target (R, 1)."""
        x = self.inputs(x_num, x_cat)
        parts = [np.zeros((0, self.spec.n_out), np.float32)]
        with offline(), torch_threads(self.n_threads), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for start in range(0, len(x), _ROWS):
                rows = x[start : start + _ROWS]
                answer = self._answer(np.concatenate([rows, np.repeat(rows[:1], -len(rows) % _STEP, axis=0)]))
                parts.append(np.asarray(answer, np.float32).reshape(-1, self.spec.n_out)[: len(rows)])
        return np.concatenate(parts)

    def save(self, folder: Path) -> None:
        """Writes the context and which weights belong to it."""
        if self._weights is None:
            raise ValueError("save needs a fitted model")
        x, y = self._context
        save_file({"x": np.ascontiguousarray(x), "y": np.ascontiguousarray(y)}, folder / CONTEXT)
        weights = {"file": self._weights.path.name, "sha256": digest(self._weights.path)}
        manifest = {"format": FORMAT, "seed": self.seed, "weights": weights}
        (folder / MANIFEST).write_text(json.dumps(manifest), "utf-8")

    def load(self, folder: Path) -> None:
        """Reads what `save` wrote, and the weights on this machine.

        Raises:
            UserError: A missing or damaged file; weights that are absent or others than the saved ones.
        """
        path = folder / MANIFEST
        try:
            manifest = json.loads(path.read_text("utf-8"))
            if manifest["format"] != FORMAT:
                raise ValueError(f"format {manifest['format']}, expected {FORMAT}")
            seed, name = int(manifest["seed"]), str(manifest["weights"]["file"])
            expected = str(manifest["weights"]["sha256"])
            path = folder / CONTEXT
            arrays = load_file(path)
            x, y = arrays["x"], arrays["y"]
            self._check_context(x, y)
        except FileNotFoundError as error:
            raise UserError(f"{path}: missing") from error
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise UserError(f"{path}: damaged ({type(error).__name__}: {error})") from error
        weights = self.weights(self.spec)
        if digest(weights.path) != expected:
            raise UserError(
                f"{folder}: was fitted with other weights ({name}, SHA-256 {expected[:12]}...) than {weights.path}; "
                f"set {self.variable} to that file"
            )
        self.seed, self._context, self._weights = seed, (x, y), weights
        self._start()

    def _check_context(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        """ValueError for arrays that are no context of such a table."""
        shape = (len(y), self.spec.n_num + self.spec.n_cat)
        if x.shape != shape or x.dtype != np.float32 or y.ndim != 1 or not len(y):
            raise ValueError(f"inputs {x.dtype} {x.shape}, expected float32 {shape}")
        if self.spec.task.is_classification:
            if y.dtype != np.int64 or not np.array_equal(np.unique(y), np.arange(self.spec.n_out)):
                raise ValueError(f"classes other than 0 to {self.spec.n_out - 1}")
        elif y.dtype != np.float32 or not np.isfinite(y).all():
            raise ValueError("targets that are no finite numbers")

    def _start(self) -> None:
        assert self._weights is not None
        with offline(), torch_threads(self.n_threads), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                self._model = self.start(self._weights.path, *self._context)
            except ValueError as error:
                reason = " ".join(str(error).split())[:300]
                raise TrainingFailed(f"{self.package} refuses the training rows: {reason}") from error

    def _answer(self, x: Array) -> NDArray[Any]:
        classes = self.spec.task.is_classification
        answer: NDArray[Any] = self._model.predict_proba(x) if classes else self._model.predict(x, output_type="mean")
        return answer


def context_rows(y: NDArray[Any], limit: int, classes: bool, seed: int) -> NDArray[np.int64]:
    """Positions of at most `limit` rows, in order; of classes each in proportion, and at least one row.

    Args:
        y: (R,) targets.
        limit: Rows at most, or one per class where that is more.
        classes: Whether `y` holds classes.
        seed: Of the draw.
    """
    order = np.random.default_rng(seed).permutation(len(y))
    if len(y) <= limit:
        return np.arange(len(y))
    if not classes:
        return np.sort(order[:limit])
    order = order[np.argsort(y[order], kind="stable")]  # class after class, shuffled within
    chosen = order[(2 * np.arange(limit) + 1) * len(y) // (2 * limit)]  # every so many rows: each class its share
    counts = np.bincount(y[chosen], minlength=int(y.max()) + 1)
    for label in np.setdiff1d(y, y[chosen]):
        largest = counts.argmax()
        chosen[np.flatnonzero(y[chosen] == largest)[0]] = order[y[order] == label][0]
        counts[[largest, label]] += [-1, 1]
    return np.sort(chosen)
