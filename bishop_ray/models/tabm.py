"""TabM: embedded numbers and one-hot categories -> k MLPs that share most of their weights -> their mean prediction."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from rtdl_num_embeddings import PiecewiseLinearEmbeddings
from tabm import TabM as Members
from torch import Tensor, nn

from bishop_ray.data.table import Table, TableSpec
from bishop_ray.models.base import Network, NumericKind
from bishop_ray.models.embeddings import OneHot, quantile_edges
from bishop_ray.models.validation import check_rate, check_whole

_NARROWEST = 1e-4
"""Bins at least this wide (numbers come as normal ranks): the encoding divides by the width in float32."""


class TabM(Network):
    """TabM (Gorishniy et al. 2025, "TabM: Advancing Tabular Deep Learning with Parameter-Efficient Ensembling").

    The network is that of its authors' package ``tabm``, numbers through the piecewise-linear embeddings of their
    ``rtdl_num_embeddings`` (version B) as in the paper's TabM with a dagger. Each of the k members is trained on its
    own loss; predictions are the mean of their probabilities, or of their values. Numbers are mapped to normal ranks,
    as the paper's preprocessing does; categories are one-hot, code 0 (missing or unseen) all zeros. One deviation: all
    members see the same batches, the package's simpler way, where the paper gives each its own.

    Args:
        spec: The table.
        n_blocks: Hidden layers of each member.
        d_block: Their width.
        dropout: Rate after each.
        k: Members.
        n_bins: Bins of a numerical column, of equal share in the training rows.
        d_embedding: Width of an embedded number.

    Raises:
        ValueError: An argument out of range; the message names it.
    """

    numeric: ClassVar[NumericKind] = "quantile"

    def __init__(
        self,
        spec: TableSpec,
        *,
        n_blocks: int = 2,
        d_block: int = 512,
        dropout: float = 0.1,
        k: int = 32,
        n_bins: int = 48,
        d_embedding: int = 16,
    ) -> None:
        super().__init__()
        _check(n_blocks, d_block, dropout, k, n_bins, d_embedding)
        self.spec, self.k = spec, k
        # A column without levels still is one input, always zero: the package wants at least one.
        sizes = tuple(max(size, 2) for size in spec.cat_cardinalities)
        self.body = Members.make(
            n_num_features=spec.n_num,
            cat_cardinalities=[size - 1 for size in sizes],
            d_out=spec.n_out,
            num_embeddings=_embeddings(spec.n_num, n_bins, d_embedding) if spec.n_num else None,
            n_blocks=n_blocks,
            d_block=d_block,
            dropout=dropout,
            k=k,
        )
        if sizes:
            self.body.cat_module = _Levels(sizes)

    @classmethod
    def check(cls, **hparams: Any) -> None:
        """Nothing, if the constructor takes these hyperparameters; see `Network.check`."""
        _check(**{**(cls.__init__.__kwdefaults__ or {}), **hparams})

    @torch.no_grad()
    def observe(self, train: Table) -> None:
        """Takes the bin edges of the numerical columns from the training rows."""
        if not self.spec.n_num:
            return
        encoding = self.body.num_module.impl
        n_bins = encoding.weight.shape[1]
        encoding.weight.zero_()
        encoding.bias.zero_()
        for column, edges in enumerate(quantile_edges(train.x_num, n_bins)):
            apart = _apart(edges)
            scale = 1.0 / np.diff(apart)
            shift = -apart[:-1] * scale
            # The package's layout: the last bin stands last, whatever the number of bins.
            places = [*range(len(scale) - 1), n_bins - 1]
            encoding.weight[column, places] = torch.tensor(scale, dtype=torch.float32, device=encoding.weight.device)
            encoding.bias[column, places] = torch.tensor(shift, dtype=torch.float32, device=encoding.bias.device)
            encoding.single_bin_mask[column] = len(scale) == 1

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        """(B, N), (B, C) -> (B, k, K) of all members in training; (B, K) in evaluation, see `Network.forward`."""
        out: Tensor = self.body(x_num if self.spec.n_num else None, x_cat if self.spec.n_cat else None)  # (B, k, K)
        if self.training:
            return out
        if not self.spec.task.is_classification:
            return out.mean(1)
        # Logits whose softmax is the mean of the members' probabilities.
        return out.log_softmax(-1).logsumexp(1) - math.log(self.k)

    def loss(self, out: Tensor, y: Tensor, weight: Tensor | None = None) -> Tensor:
        """Mean over rows and members of each member's own loss: (B, k, K), (B,), (B,) -> scalar."""
        each = y.repeat_interleave(self.k)  # (B * k,)
        weights = None if weight is None else weight.repeat_interleave(self.k)  # (B * k,)
        return super().loss(out.flatten(0, 1), each, weights)  # of (B * k, K)


class _Levels(nn.Module):
    """`OneHot` of categories alone, in the place of the package's, which has a column for code 0 too."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.levels = OneHot(0, sizes)

    def forward(self, codes: Tensor) -> Tensor:
        """(B, C) int64 -> (B, U) float."""
        levels: Tensor = self.levels(torch.empty(len(codes), 0, device=codes.device), codes)
        return levels


def _embeddings(n_num: int, n_bins: int, width: int) -> PiecewiseLinearEmbeddings:
    """Embeddings of the final sizes, with bins that `observe` replaces."""
    # The package looks at the bins' values, which a network on the meta device would not have.
    with torch.device("cpu"):
        edges = torch.linspace(-1.0, 1.0, n_bins + 1)
        embeddings = PiecewiseLinearEmbeddings([edges] * n_num, width, activation=False, version="B")
    embeddings.impl.register_buffer("single_bin_mask", torch.zeros(n_num, dtype=torch.bool))
    for parameter in embeddings.linear0.parameters():
        parameter.no_weight_decay = True
    return embeddings


def _apart(edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """The edges that leave bins of some width, at least two."""
    kept = [edges[0]]
    for edge in edges[1:]:
        if edge - kept[-1] >= _NARROWEST:
            kept.append(edge)
    return np.array(kept if len(kept) > 1 else [edges[0], edges[0] + 1.0])


def _check(n_blocks: int, d_block: int, dropout: float, k: int, n_bins: int, d_embedding: int) -> None:
    check_whole(1, n_blocks=n_blocks, d_block=d_block, k=k, d_embedding=d_embedding)
    check_whole(2, n_bins=n_bins)
    check_rate(dropout=dropout)
