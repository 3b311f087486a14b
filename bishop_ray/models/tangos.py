"""TANGOS: an MLP whose hidden units are pushed to look at few features each, and at different ones.

Letters: B rows, N numerical and C categorical columns, U one-hot levels, I = N + U inputs, W hidden width, K outputs.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bishop_ray.data.table import TableSpec
from bishop_ray.models.base import Network
from bishop_ray.models.embeddings import OneHot

_PRODUCTS = 1 << 26
"""Multiplications that the attributions of one batch may take; a wide table's come from fewer of its rows."""


class TANGOS(Network):
    """MLP regularised by gradient orthogonalisation and specialisation (Jeffares et al., ICLR 2023, section 4).

    The loss gets ``lambda_1 * specialisation + lambda_2 * orthogonalisation`` of the attributions: the gradients of the
    last hidden layer's units with respect to the inputs, see `specialisation` and `orthogonalisation`. Numbers are
    standardised and categories one-hot, as in the authors' experiments.

    Deviations: the authors' hidden layers are one unit wider than the input, which is 9 units for a table of 8 numbers
    and thousands for a few long categories; here the width is fixed. The regularisers act from the first step, the
    authors switch them on after three epochs. When a batch's attributions would take more than 2^26 multiplications,
    they are taken of its first rows, which are random: both terms are means over rows.

    Args:
        spec: The table.
        lambda_1: Weight of the specialisation term.
        lambda_2: Weight of the orthogonalisation term.
        n_pairs: Pairs of units compared per batch, drawn anew each time; all pairs where there are no more.
        d_hidden: W.
        n_layers: Hidden layers.
        dropout: Rate after every hidden layer, below 1.

    Raises:
        ValueError: An argument out of range; the message names it.
    """

    def __init__(
        self,
        spec: TableSpec,
        *,
        lambda_1: float = 1.0,
        lambda_2: float = 0.1,
        n_pairs: int = 50,
        d_hidden: int = 128,
        n_layers: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        for name, value, low in (("n_pairs", n_pairs, 1), ("d_hidden", d_hidden, 2), ("n_layers", n_layers, 1)):
            if value < low:
                raise ValueError(f"{name} must be >= {low}; found {value}")
        for name, weight in (("lambda_1", lambda_1), ("lambda_2", lambda_2)):
            if not weight >= 0:
                raise ValueError(f"{name} must be >= 0; found {weight}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1); found {dropout}")
        self.spec = spec
        self.lambda_1, self.lambda_2, self.n_pairs, self.dropout = lambda_1, lambda_2, n_pairs, dropout
        self.inputs = OneHot(spec.n_num, spec.cat_cardinalities)
        widths = [self.inputs.width] + [d_hidden] * n_layers
        self.layers = nn.ModuleList(nn.Linear(d_in, d_out) for d_in, d_out in pairwise(widths))
        self.head = nn.Linear(d_hidden, spec.n_out)
        self._slopes: list[Tensor] = []

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        """(B, N), (B, C) -> (B, K); see `Network.forward`."""
        x = self.inputs(x_num, x_cat)  # (B, I)
        self._slopes = []
        for layer in self.layers:
            x = F.dropout(torch.relu(layer(x)), self.dropout, self.training)  # (B, W)
            if self.training:
                # A unit that is cut off or dropped is 0; the others pass on what they get, scaled by dropout.
                self._slopes.append((x > 0).to(x.dtype) / (1 - self.dropout))
        out: Tensor = self.head(x)
        return out

    def attributions(self) -> Tensor:
        """Gradients of the last hidden layer with respect to the inputs, at the last training batch: (B', W, I).

        In closed form, ``D_n W_n ... D_1 W_1`` with D the slopes of ReLU and dropout: the same as differentiating
        each unit, and differentiable itself, since the slopes are constant almost everywhere. B' <= B, see the class.

        Raises:
            ValueError: The last forward pass was not one of training.
        """
        if not self._slopes:
            raise ValueError("attributions need a forward pass in training mode")
        width, n_inputs = self.head.in_features, self.inputs.width
        products = max(1, n_inputs * width * (1 + (len(self.layers) - 1) * width))
        rows = min(len(self._slopes[0]), max(1, _PRODUCTS // products))
        first, *others = [layer.weight for layer in self.layers if isinstance(layer, nn.Linear)]
        found = self._slopes[0][:rows, :, None] * first  # (B', W, I)
        for slope, weight in zip(self._slopes[1:], others, strict=True):
            found = slope[:rows, :, None] * (weight @ found)
        return found

    def penalty(self) -> Tensor | None:
        """Both regularisers of the last training batch, weighted; None outside training and without inputs."""
        if not (self.training and self._slopes and self.inputs.width and len(self._slopes[0])):
            return None
        found = self.attributions()
        total = self.lambda_1 * specialisation(found)
        if self.lambda_2:
            total = total + self.lambda_2 * orthogonalisation(found, self.n_pairs)
        return total


def specialisation(attributions: Tensor) -> Tensor:
    """Mean absolute attribution: (B, W, I) -> scalar (L_spec; over the inputs too, as in the authors' code)."""
    return attributions.abs().mean()


def orthogonalisation(attributions: Tensor, n_pairs: int) -> Tensor:
    """Mean absolute cosine between the attributions of two different units: (B, W, I) -> scalar (L_orth).

    A unit without any attribution counts as orthogonal to all.

    Args:
        attributions: W >= 2.
        n_pairs: Pairs drawn from torch's generator; all pairs, once each, where there are no more.
    """
    width, device = attributions.shape[1], attributions.device
    if n_pairs >= width * (width - 1) // 2:
        one, other = torch.tril_indices(width, width, -1, device=device)
    else:
        one = torch.randint(width, (n_pairs,), device=device)
        other = (one + torch.randint(1, width, (n_pairs,), device=device)) % width
    return F.cosine_similarity(attributions[:, one], attributions[:, other], dim=-1, eps=1e-6).abs().mean()
