"""Checks of `BiSHop`'s arguments."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from bishop_ray.data.table import Table, TableSpec
from bishop_ray.models.base import Network
from bishop_ray.models.bishop.authors import reference_arguments, reference_spec, reference_state
from bishop_ray.models.bishop.bishop_config import BlockOptions
from bishop_ray.models.bishop.block import MODULES, BiSHopModule
from bishop_ray.models.bishop.decoder import Decoder, LinearReadout
from bishop_ray.models.bishop.encoder import Encoder, PatchEmbedding
from bishop_ray.models.bishop.entmax import ACTIVATIONS
from bishop_ray.models.bishop.hopfield import Association
from bishop_ray.models.embeddings import CategoryEmbedding, PiecewiseLinear, RepeatedNumber

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "activation": ACTIVATIONS,
    "categorical_embedding": ("column", "plain"),
    "numeric_embedding": ("piecewise", "raw"),
    "module": MODULES,
    "compat": (None, "authors"),
}
_LOWEST = {
    "d_embedding": 1,
    "stride": 1,
    "n_pool": 1,
    "n_merge": 2,
    "d_model": 1,
    "d_ff": 1,
    "n_heads": 1,
    "n_encoder_levels": 1,
    "n_decoded": 1,
    "head_max_width": 1,
}


def check_arguments(arguments: dict[str, Any]) -> None:
    """Nothing, if all hyperparameters in `arguments` (by name) can be built.

    Raises:
        ValueError: Names the argument, what was expected and what was found.
    """
    for name, lowest in _LOWEST.items():
        value = arguments[name]
        if name == "head_max_width" and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise ValueError(f"{name} must be a whole number >= {lowest}; found {value!r}")
    if arguments["n_heads"] > arguments["d_model"]:
        raise ValueError(f"n_heads must be <= d_model ({arguments['d_model']}); found {arguments['n_heads']}")
    for name in ("dropout", "head_dropout"):
        if not 0.0 <= arguments[name] < 1.0:
            raise ValueError(f"{name} must lie in [0, 1); found {arguments[name]!r}")
    if not 1.0 < arguments["fixed_alpha"] <= 2.0:
        raise ValueError(f"fixed_alpha must lie in (1, 2]; found {arguments['fixed_alpha']!r}")
    for name, known in _CHOICES.items():
        if arguments[name] not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; found {arguments[name]!r}")


class BiSHop(Network):
    """Bi-directional sparse Hopfield network (Xu et al., ICML 2024), letters in the package's docstring.

    Features are ordered categorical first. Where the paper, its tables and the authors' code disagree, defaults follow
    the paper's equations and the authors' code for what the paper leaves open.

    Args:
        spec: The table.
        d_embedding: E, also the number of quantile bins of a numerical column.
        stride: L, embedding positions per patch; 1 switches patch embedding off.
        n_pool: M, pooling prototypes per patch position.
        n_merge: r, patches merged into one from the second encoder level on.
        d_model: D.
        d_ff: Hidden width of the blocks' feed-forward parts.
        n_heads: H; a head is ``d_model // n_heads`` wide, H need not divide D.
        n_encoder_levels: Levels of the encoder; the decoder has one more.
        decoder: Off: a linear map of the last encoder level takes its place.
        n_decoded: Decoded representations per feature, rounded up to a multiple of L (S).
        dropout: Rate in the blocks.
        shared_start: The decoder's first block, whose input is the same for all rows, is computed once per training
            step, with one draw of dropout for all rows of the batch; without dropout it always is.
        head_dropout: Rate in the MLP head.
        head_max_width: Bound of the head's hidden widths, which are 4, 2 and 1 times its input; None for no bound.
        activation: "entmax" (one learnable α per association), "entmax_fixed", "sparsemax" or "softmax".
        fixed_alpha: α of "entmax_fixed", in (1, 2].
        hopfield_values: Values are projected keys; off: plain attention.
        categorical_embedding: "column" or "plain" (no part shared by a column's categories).
        numeric_embedding: "piecewise" or "raw" (the number at every embedding position).
        module: "bishop" or "mlp" (every block is a cell-wise MLP).
        swap_directions: Features are cut into patches and embedding positions kept apart, instead of the reverse.
        mix_heads: Heads are flattened before cells, as in the authors' code; off: concatenated per cell (the paper).
            On because validation scores were higher so on most of eight measured tables.
        extrapolate: The outer bins of the piecewise encoding go on beyond the training range.
        pool_query_projection: Prototypes pass a query projection (authors' code); off: the paper's GSHPooling.
        free_alpha: α itself is the parameter, not a function that stays in (1, 2].
        compat: "authors" sets mix_heads, free_alpha, no extrapolation and an unbounded head, as their release.

    Raises:
        ValueError: An argument out of range; the message names it.
    """

    def __init__(
        self,
        spec: TableSpec,
        *,
        d_embedding: int = 32,
        stride: int = 8,
        n_pool: int = 10,
        n_merge: int = 4,
        d_model: int = 256,
        d_ff: int = 512,
        n_heads: int = 4,
        n_encoder_levels: int = 3,
        decoder: bool = True,
        n_decoded: int = 24,
        dropout: float = 0.2,
        shared_start: bool = False,
        head_dropout: float = 0.2,
        head_max_width: int | None = 1024,
        activation: str = "entmax",
        fixed_alpha: float = 1.5,
        hopfield_values: bool = True,
        categorical_embedding: str = "column",
        numeric_embedding: str = "piecewise",
        module: str = "bishop",
        swap_directions: bool = False,
        mix_heads: bool = True,
        extrapolate: bool = True,
        pool_query_projection: bool = True,
        free_alpha: bool = False,
        compat: Literal["authors"] | str | None = None,
    ) -> None:
        super().__init__()
        check_arguments(locals())
        if compat == "authors":
            mix_heads, free_alpha, extrapolate, head_max_width = True, True, False, None
        self.spec = spec
        self.swap_directions = swap_directions
        options = BlockOptions(
            d_model=d_model,
            n_heads=n_heads,
            d_ff=d_ff,
            n_pool=n_pool,
            dropout=dropout,
            activation=activation,
            fixed_alpha=fixed_alpha,
            free_alpha=free_alpha,
            hopfield_values=hopfield_values,
            mix_heads=mix_heads,
            pool_query_projection=pool_query_projection,
            module=module,
        )
        self._build_embeddings(d_embedding, categorical_embedding, numeric_embedding, extrapolate)
        n_features = spec.n_cat + spec.n_num
        n_axis, n_positions = (d_embedding, n_features) if swap_directions else (n_features, d_embedding)
        self.patches = PatchEmbedding(n_axis, n_positions, stride, d_model)
        self.encoder = Encoder(options, self.patches.n_patches, n_merge, n_encoder_levels)
        n_out_patches = -(-n_decoded // stride)
        self.decoder: Decoder | LinearReadout
        if decoder:
            self.decoder = Decoder(options, n_axis, n_out_patches, stride, n_encoder_levels + 1, shared_start)
        else:
            self.decoder = LinearReadout(self.encoder.n_patches, d_model, n_out_patches * stride)
        self.head = _head(n_axis * n_out_patches * stride, spec.n_out, head_dropout, head_max_width)

    @classmethod
    def check(cls, **hparams: Any) -> None:
        """Nothing, if the constructor takes these hyperparameters; see `Network.check`."""
        check_arguments({**(cls.__init__.__kwdefaults__ or {}), **hparams})

    def _build_embeddings(self, width: int, categorical: str, numeric: str, extrapolate: bool) -> None:
        self.categories: CategoryEmbedding | None = None
        self.numbers: PiecewiseLinear | RepeatedNumber | None = None
        if self.spec.n_cat:
            share_div = 8 if categorical == "column" else 0
            self.categories = CategoryEmbedding(self.spec.cat_cardinalities, width, share_div)
        if self.spec.n_num:
            piecewise = numeric == "piecewise"
            self.numbers = PiecewiseLinear(self.spec.n_num, width, extrapolate) if piecewise else RepeatedNumber(width)

    def observe(self, train: Table) -> None:
        """Takes the quantile edges of the numerical columns from the training rows."""
        if isinstance(self.numbers, PiecewiseLinear):
            self.numbers.observe(train.x_num)

    def embed(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        """(B, N), (B, C) -> (B, F, E), categorical features first.

        Raises:
            ValueError: Another number of columns than the table has.
        """
        found = (x_num.shape[-1], x_cat.shape[-1])
        if found != (self.spec.n_num, self.spec.n_cat):
            raise ValueError(
                f"expected {self.spec.n_num} numerical and {self.spec.n_cat} categorical columns; found {found}"
            )
        parts = []
        if self.categories is not None:
            parts.append(self.categories(x_cat))
        if self.numbers is not None:
            parts.append(self.numbers(x_num))
        return torch.cat(parts, dim=1)

    def forward(self, x_num: Tensor, x_cat: Tensor) -> Tensor:
        """(B, N), (B, C) -> (B, K); see `Network.forward`."""
        x = self.embed(x_num, x_cat)  # (B, F, E)
        x = self.patches(x.transpose(1, 2) if self.swap_directions else x)  # (B, A, P, D)
        decoded = self.decoder(self.encoder(x))  # (B, A, S)
        out: Tensor = self.head(decoded.transpose(1, 2).flatten(1))  # (B, S * A) -> (B, K)
        return out

    def associations(self) -> dict[str, Association]:
        """Every association by a short name: ``enc1.column``, ``enc1.pool``, ``enc1.row``, ``dec0.cross``, ...

        Encoder levels count from 1; decoder level h reads encoder output h, and 0 is the patches themselves.
        """
        blocks = {f"enc{i}": level.block for i, level in enumerate(self.encoder.levels, 1)}
        crosses: dict[str, Association] = {}
        if isinstance(self.decoder, Decoder):
            blocks |= {f"dec{i}": level.block for i, level in enumerate(self.decoder.levels)}
            for i, level in enumerate(self.decoder.levels):
                assert isinstance(level.cross, Association)
                crosses[f"dec{i}.cross"] = level.cross
        found: dict[str, Association] = {}
        for name, block in blocks.items():
            if isinstance(block, BiSHopModule):
                found[f"{name}.column"] = block.column.association
                found[f"{name}.pool"] = block.row.pool.association
                found[f"{name}.row"] = block.row.association
        return found | crosses

    def train(self, mode: bool = True) -> Self:
        """Sets the mode; the first batch after entering evaluation is the one `diagnostics` looks at."""
        if not mode:
            for association in self.associations().values():
                association.record = True
        return super().train(mode)

    def diagnostics(self) -> dict[str, float]:
        """``alpha/NAME`` and ``nonzero/NAME`` (share of non-zero weights) per association of the last evaluation."""
        numbers: dict[str, float] = {}
        for name, association in self.associations().items():
            numbers[f"alpha/{name}"] = association.activation.alpha
            if association.nonzero is not None:
                numbers[f"nonzero/{name}"] = association.nonzero
        return numbers

    @classmethod
    def from_reference(cls, config: dict[str, Any], state: dict[str, Tensor], quantiles: Tensor | None) -> Self:
        """A network with the weights of the authors' release, in evaluation mode.

        Args:
            config: Their arguments: n_cat, n_num, n_out, n_class, emb_dim, out_dim, patch_dim, factor, n_agg, d_model,
                d_ff, n_heads, e_layer, d_layer, actv, hopfield.
            state: Their state dict.
            quantiles: (N, E + 1) bin edges, None without numerical columns.

        Raises:
            ValueError: A configuration that this class has no arguments for.
        """
        model = cls(reference_spec(config), compat="authors", **reference_arguments(config))
        model.load_state_dict(reference_state(config, state, quantiles))
        return model.eval()


def _head(n_in: int, n_out: int, dropout: float, max_width: int | None) -> nn.Sequential:
    """ReLU MLP with hidden widths 4, 2 and 1 times its input, each at most `max_width`."""
    layers: list[nn.Module] = []
    width = n_in
    for factor in (4, 2, 1):
        hidden = factor * n_in if max_width is None else min(factor * n_in, max_width)
        layers += [nn.Dropout(dropout), nn.Linear(width, hidden), nn.ReLU()]
        width = hidden
    return nn.Sequential(*layers, nn.Linear(width, n_out))
