"""TabNet: one-hot inputs -> decision steps, each on the columns that its sparse mask lets through."""

from __future__ import annotations

from typing import ClassVar

import torch
from pytorch_tabnet.tab_network import TabNetNoEmbeddings
from torch import Tensor

from bishop_ray.data.table import TableSpec
from bishop_ray.models.base import Network, NumericKind
from bishop_ray.models.embeddings import OneHot
from bishop_ray.models.validation import check_choice, check_whole

GHOST_ROWS = 128
"""Rows that share one batch norm (ghost batch norm); the default of ``pytorch_tabnet``."""
MAX_INPUTS = 5000
"""One-hot inputs a table may have: a square matrix of them is multiplied in every step."""


class TabNet(Network):
    """TabNet (Arik and Pfister 2021, "TabNet: Attentive Interpretable Tabular Learning").

    The network is that of ``pytorch_tabnet`` without its embeddings, which build a column at a time; its training, its
    files and its pre-training are not used. Two deviations. The paper feeds raw numbers to a batch norm: here they come
    standardised before it, so that far outliers do no harm. The paper embeds categories: they are one-hot here, as the
    BiSHop paper has its deep baselines, each level with a mask entry of its own; the library's embeddings of width 1
    scored up to a point of AUC lower on a table of 16 categories.

    Args:
        spec: The table.
        n_d: Width of a step's decision.
        n_a: Width of what the next step's mask is made of.
        n_steps: Decision steps.
        gamma: How often a column may be used again: 1 for in one step only, larger for more.
        n_independent: Gated layers of a step's own.
        n_shared: Gated layers that all steps share.
        lambda_sparse: Weight of the masks' mean entropy in the loss.
        mask_type: "sparsemax" or "entmax" (1.5-entmax).
        momentum: Of the running statistics of the ghost batch norms.

    Raises:
        ValueError: An argument out of range; the message names it.
    """

    numeric: ClassVar[NumericKind] = "normal"

    @classmethod
    def cannot(cls, spec: TableSpec, rows: int) -> str:
        """A reason when the table has too many one-hot inputs; see `Network.cannot`."""
        width = OneHot(spec.n_num, spec.cat_cardinalities).width
        return f"more than {MAX_INPUTS:,} one-hot inputs ({width:,})" if width > MAX_INPUTS else ""

    def __init__(
        self,
        spec: TableSpec,
        *,
        n_d: int = 8,
        n_a: int = 8,
        n_steps: int = 3,
        gamma: float = 1.3,
        n_independent: int = 2,
        n_shared: int = 2,
        lambda_sparse: float = 1e-3,
        mask_type: str = "sparsemax",
        momentum: float = 0.02,
    ) -> None:
        super().__init__()
        check_whole(1, n_d=n_d, n_a=n_a, n_steps=n_steps)
        check_whole(0, n_independent=n_independent, n_shared=n_shared)
        check_choice(("sparsemax", "entmax"), mask_type=mask_type)
        if n_independent + n_shared == 0:
            raise ValueError("n_independent + n_shared must be >= 1; found 0")
        if not gamma >= 1.0:
            raise ValueError(f"gamma must be >= 1; found {gamma!r}")
        if not lambda_sparse >= 0.0:
            raise ValueError(f"lambda_sparse must be >= 0; found {lambda_sparse!r}")
        if not 0.0 < momentum <= 1.0:
            raise ValueError(f"momentum must lie in (0, 1]; found {momentum!r}")
        self.spec, self.lambda_sparse = spec, lambda_sparse
        self.inputs = OneHot(spec.n_num, spec.cat_cardinalities)
        groups = torch.eye(self.inputs.width)
        self.body = TabNetNoEmbeddings(
            self.inputs.width,
            spec.n_out,
            n_d=n_d,
            n_a=n_a,
            n_steps=n_steps,
            gamma=gamma,
            n_independent=n_independent,
            n_shared=n_shared,
            virtual_batch_size=GHOST_ROWS,
            momentum=momentum,
            mask_type=mask_type,
            group_attention_matrix=groups,
        )
        # The library keeps it as a plain attribute, which would stay behind when the network moves to a GPU.
        encoder = self.body.encoder
        del encoder.group_attention_matrix
        encoder.register_buffer("group_attention_matrix", groups, persistent=False)
        self._entropy: Tensor | None = None

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        """(B, N), (B, C) -> (B, K); see `Network.forward`."""
        if not len(x_num):
            return x_num.new_zeros(0, self.spec.n_out)  # the library cannot cut no rows into ghost batches
        out: Tensor
        out, negative_entropy = self.body(self.inputs(x_num, x_cat))
        self._entropy = -negative_entropy if self.training else None
        return out

    def penalty(self) -> Tensor | None:
        """The masks' mean entropy in the last forward pass (paper, section "Feature selection"), weighted."""
        entropy, self._entropy = self._entropy, None
        return None if entropy is None else self.lambda_sparse * entropy
