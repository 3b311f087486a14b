"""Attention of BiSHop's row-wise layers per feature.

Only some associations choose among features. Each gives non-negative weights with sum 1, many of them zero where its α
is above 1 (the paper's learnable sparsity). They are taken as the network computes them, by hooks on their activations.

*Features kept apart* (the default: the axis A holds the F features). Within a feature the column-wise associations and
the decoder's cross retrieval choose among that feature's own patches. Features meet in the row-wise blocks: M
prototypes pool the F cells of a patch position, and the cells read the M summaries. The weight of feature f in a block
is ``Σ_m read[m] · pool[m, f]``. ``pool[m, f]``: the pooling weights, averaged over the heads that summary m is made of
(with ``mix_heads`` those are other pairs of head and prototype than without). ``read[m]``: how much the cells read
summary m, averaged over cells and heads. Blocks: of every encoder level and of decoder levels 1 and up; level 0 of the
decoder sees learned positions only, no row of the table.

*Swapped directions* (T holds the features, L to a patch). The column-wise associations of the encoder and the decoder's
cross retrievals choose among patches. The weight of a patch, averaged over queries, heads and A, goes in equal shares
to its L places, those of padding to the feature they repeat; a merged patch is made of its r patches in equal shares.

In both, the result is the mean over patch positions and blocks: the F weights of a row have sum 1.

Letters in the package's docstring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bishop_ray.models.base import Array
from bishop_ray.models.bishop.encoder import PatchMerge
from bishop_ray.models.bishop.hopfield import Association
from bishop_ray.models.bishop.model import BiSHop

Found = dict[str, Tensor]
_CELLS = 20_000
"""Rows times features of a batch: weights of all heads and prototypes are in memory at once."""
_ROWS = 256


def feature_weights(network: BiSHop, x_num: Array, x_cat: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """The weight of each feature in each row, see above; the network stays as it is, and so do random states.

    Args:
        network: Fitted.
        x_num: (R, N).
        x_cat: (R, C).

    Returns:
        (R, F) with rows of sum 1, categorical features first; None where no association chooses among features
        (``module="mlp"``).
    """
    n_features = network.spec.n_cat + network.spec.n_num
    names = _sources(network)
    if not names:
        return None
    parts = [np.zeros((0, n_features))]
    batch = max(1, min(_ROWS, _CELLS // n_features))
    for start in range(0, len(x_num), batch):
        rows = slice(start, start + batch)
        with _captured(network, names) as found:
            network.predict(x_num[rows], x_cat[rows], batch)
        count = len(x_num[rows])
        combine = _swapped if network.swap_directions else _apart
        parts.append(combine(network, found, names, count).cpu().numpy())
    return np.concatenate(parts)


def _sources(network: BiSHop) -> list[str]:
    """The associations that are read."""
    names = [name for name in network.associations() if not name.startswith("dec0.")]
    if not network.swap_directions:
        return [name for name in names if name.endswith((".pool", ".row"))]
    crosses = [name for name in network.associations() if name.endswith(".cross")]
    return [name for name in names if name.startswith("enc") and name.endswith(".column")] + crosses


@contextmanager
def _captured(network: BiSHop, names: list[str]) -> Iterator[Found]:
    """By name, reduced weights of the pass within; an association with a single memory computes none."""
    found: Found = {}
    associations = network.associations()
    records = {name: (a.record, a.nonzero) for name, a in associations.items()}
    training = network.training
    hooks = [associations[n].activation.register_forward_hook(_keep(found, n, associations[n])) for n in names]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        network.train(training)
        for name, association in associations.items():
            association.record, association.nonzero = records[name]


def _keep(found: Found, name: str, association: Association) -> Callable[..., None]:
    def hook(_module: object, _inputs: object, weights: Tensor) -> None:
        weights = weights.detach().double()  # (B, P or A, H, L, S)
        found[name] = _summaries(association, weights) if name.endswith(".pool") else weights.mean((-2, -3))

    return hook


def _summaries(association: Association, weights: Tensor) -> Tensor:
    """(B, P, H, M, A) -> (B, P, M, A): what each summary is made of, in the order `Association` joins heads in."""
    *leading, heads, prototypes, cells = weights.shape
    if not association.options.mix_heads:
        weights = weights.transpose(-2, -3)
    return weights.reshape(*leading, prototypes, heads, cells).mean(-2)


def _apart(network: BiSHop, found: Found, names: list[str], rows: int) -> Tensor:
    """(R, F) of row-wise blocks."""
    n_features = network.spec.n_cat + network.spec.n_num
    blocks = []
    for name in names:
        if not name.endswith(".pool"):
            continue
        pool = found.get(name)
        if pool is None:  # one feature
            blocks.append(torch.ones(rows, n_features, dtype=torch.float64))
            continue
        read = found.get(name.replace(".pool", ".row"))
        weights = pool.mean(2) if read is None else (read[..., None] * pool).sum(2)  # (B, P, F); None: one summary
        blocks.append(weights.mean(1))
    return torch.stack(blocks).mean(0)


def _swapped(network: BiSHop, found: Found, names: list[str], rows: int) -> Tensor:
    """(R, F) of associations over patches of features."""
    shares = _shares(network)
    blocks = []
    for name in names:
        level = int(name.split(".")[0][3:])
        share = shares[level].to(next(network.parameters()).device)
        weights = found.get(name)  # (B, A, P)
        mean = share.new_ones(rows, 1) if weights is None else weights.mean(1)  # None: one patch
        blocks.append(mean @ share)
    return torch.stack(blocks).mean(0)


def _shares(network: BiSHop) -> list[Tensor]:
    """Per encoder output, from 0 for the patches themselves: (P, F), the features that each patch is made of."""
    embedding, n_features = network.patches, network.spec.n_cat + network.spec.n_num
    places = [max(0, place - embedding.pad) for place in range(embedding.pad + n_features)]
    whole = torch.eye(n_features, dtype=torch.float64)[places]
    shares = [whole.reshape(embedding.n_patches, embedding.stride, n_features).mean(1)]
    for level in network.encoder.levels:
        merge = level.merge
        if not isinstance(merge, PatchMerge):
            shares.append(shares[-1])
        else:
            source = merge.source.cpu()
            shares.append(shares[-1][source].reshape(merge.n_patches, merge.n_merge, n_features).mean(1))
    return shares
