"""TabICL, by its authors' package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bishop_ray.data.table import TableSpec
from bishop_ray.models.base import Array, NumericKind
from bishop_ray.models.checkpoints import Checkpoint, read_checkpoint
from bishop_ray.models.foundation import InContextModel


class TabICL(InContextModel):
    """A transformer pretrained on synthetic tables, for more rows than TabPFN (Qu et al., ICML 2025).

    The ``tabicl`` package (https://github.com/soda-inria/tabicl), computed in float32. Missing numbers are medians with
    an indicator and categories are their codes, 0 for missing, because the package drops columns that are missing in
    all rows of a request: a row's prediction would depend on its company.

    What the network makes of the context is kept (about 50 KB per row and permutation): else every request, however
    small, would cost as much as the training rows. More classes than the weights know are predicted without that.

    Weights: the environment variable ``BISHOP_TABICL_WEIGHTS`` names a checkpoint (``.ckpt``) or a folder with one for
    classes and one for numbers; without it the cache of the Hugging Face hub is searched. Nothing is downloaded.

    Args:
        spec: The table.
        n_context: Training rows read, at most.
        n_estimators: Permutations that are averaged; the package's number.

    Raises:
        ValueError: An impossible value.
    """

    numeric: ClassVar[NumericKind] = "raw"
    package: ClassVar[str] = "tabicl"
    variable: ClassVar[str] = "BISHOP_TABICL_WEIGHTS"

    def __init__(self, spec: TableSpec, *, n_context: int = 2048, n_estimators: int = 8) -> None:
        super().__init__(spec, n_context, n_estimators)

    @classmethod
    def folders(cls) -> list[Path]:
        """Snapshots of the model in the hub's cache (huggingface_hub's ``HF_HUB_CACHE``, ``HF_HOME``)."""
        home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface").expanduser()
        hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
        snapshots = hub / "models--jingang--TabICL" / "snapshots"
        return sorted(snapshots.iterdir()) if snapshots.is_dir() else [snapshots]

    @classmethod
    def unfit(cls, checkpoint: Checkpoint, spec: TableSpec) -> str:
        """Weights for the other task."""
        if checkpoint.path.suffix == ".safetensors":
            return "are no .ckpt file, the only one the package reads"
        classes = checkpoint.setting("config", "max_classes", 0)
        if spec.task.is_classification:
            return "" if classes >= 2 else "cannot predict classes"
        return "" if classes == 0 else "cannot predict numbers"

    def inputs(self, x_num: Array, x_cat: NDArray[np.int64]) -> Array:
        """Numbers, then codes."""
        return np.hstack([x_num, x_cat]).astype(np.float32)

    def start(self, weights: Path, x: Array, y: NDArray[Any]) -> Any:
        """The package's classifier or regressor."""
        from tabicl import TabICLClassifier, TabICLRegressor

        build = TabICLClassifier if self.spec.task.is_classification else TabICLRegressor
        classes = read_checkpoint(weights).setting("config", "max_classes", 0)
        model = build(
            model_path=str(weights.absolute()),
            allow_auto_download=False,
            n_estimators=self.n_estimators,
            device=self.device,
            kv_cache=not self.spec.task.is_classification or self.spec.n_out <= classes,
            use_amp=False,
            use_fa3=False,
            random_state=self.seed,
        )
        return model.fit(x, y)
