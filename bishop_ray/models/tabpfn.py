"""TabPFN, by its authors' package."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from bishop_ray.data.table import TableSpec
from bishop_ray.models.base import Array, NumericKind
from bishop_ray.models.checkpoints import Checkpoint
from bishop_ray.models.foundation import InContextModel


class TabPFN(InContextModel):
    """A transformer pretrained on synthetic tables (Hollmann et al. 2023; second version Hollmann et al. 2025).

    The ``tabpfn`` package (https://github.com/PriorLabs/TabPFN) with the protocol of the BiSHop paper: 1,024 training
    rows, 32 permutations. The paper ran the first version; today's package reads later ones. Numbers with missing
    values and category codes (0 as missing) are handed over as such, computed in float32 so that a row's prediction
    does not depend on its company.

    Weights: the environment variable ``BISHOP_TABPFN_WEIGHTS`` names a checkpoint (``.ckpt`` or ``.safetensors``) or a
    folder of them; without it the package's own cache is searched. Nothing is downloaded, nothing reported.

    Args:
        spec: The table.
        n_context: Training rows read, at most.
        n_estimators: Permutations that are averaged.
        keep_context: Keep what the network makes of the context. On a CPU a request of one row then takes seconds,
            not minutes, at the price of memory: about 2 MB per permutation and column for the second version.

    Raises:
        ValueError: An impossible value.
    """

    numeric: ClassVar[NumericKind] = "native"
    package: ClassVar[str] = "tabpfn"
    variable: ClassVar[str] = "BISHOP_TABPFN_WEIGHTS"

    def __init__(
        self, spec: TableSpec, *, n_context: int = 1024, n_estimators: int = 32, keep_context: bool = False
    ) -> None:
        super().__init__(spec, n_context, n_estimators)
        self.keep_context = keep_context

    @classmethod
    def folders(cls) -> list[Path]:
        """As ``tabpfn.model_loading.get_cache_dir``, without importing it."""
        if given := os.environ.get("TABPFN_MODEL_CACHE_DIR", "").strip():
            return [Path(given)]
        if sys.platform == "darwin":
            return [Path.home() / "Library" / "Caches" / "tabpfn"]
        variable = "APPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
        return [Path(os.environ.get(variable, "").strip() or Path.home() / ".cache") / "tabpfn"]

    @classmethod
    def unfit(cls, checkpoint: Checkpoint, spec: TableSpec) -> str:
        """Weights without the task's head, or with fewer classes."""
        if not spec.task.is_classification:
            borders = any(name.endswith(("criterion.borders", "regression_borders")) for name in checkpoint.names)
            return "" if borders else "cannot predict numbers"
        heads = checkpoint.setting("config", "max_num_classes", 0)
        most = min(heads, checkpoint.setting("inference_config", "MAX_NUMBER_OF_CLASSES", 10))
        if most < 2:
            return "cannot predict classes"
        return f"know at most {most} classes; the table has {spec.n_out}" if spec.n_out > most else ""

    def inputs(self, x_num: Array, x_cat: NDArray[np.int64]) -> Array:
        """Numbers, then codes; missing ones are NaN."""
        return np.hstack([x_num, np.where(x_cat > 0, x_cat, np.nan)]).astype(np.float32)

    def start(self, weights: Path, x: Array, y: NDArray[Any]) -> Any:
        """The package's classifier or regressor."""
        import torch
        from tabpfn import TabPFNClassifier, TabPFNRegressor

        build = TabPFNClassifier if self.spec.task.is_classification else TabPFNRegressor
        model = build(
            model_path=str(weights.absolute()),
            n_estimators=self.n_estimators,
            categorical_features_indices=list(range(self.spec.n_num, x.shape[1])),
            device=self.device,
            random_state=self.seed,
            inference_precision=torch.float32,
            fit_mode="fit_with_cache" if self.keep_context else "fit_preprocessors",
            kv_cache_precision="auto",  # unrounded
            ignore_pretraining_limits=True,  # else 1,024 rows are too many for a CPU
        )
        return model.fit(x, y)
