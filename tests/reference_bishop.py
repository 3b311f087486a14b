"""The paper's equations, one cell at a time: slow, plain, independent of the package's layers.

Nothing here is batched over rows, features, patches, heads or memories. Weights come from a state dict of the package's
network; everything else (padding, merging, flattening, α-entmax by bisection) is written again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Config:
    """The part of `BiSHop`'s arguments that the equations need."""

    n_num: int
    cardinalities: tuple[int, ...]
    d_embedding: int
    stride: int
    n_pool: int
    n_merge: int
    d_model: int
    n_heads: int
    n_encoder_levels: int
    decoder: bool
    n_decoded: int
    activation: str = "entmax"
    hopfield_values: bool = True
    swap_directions: bool = False
    mix_heads: bool = False
    extrapolate: bool = True
    pool_query_projection: bool = True


Cells = list[list[Tensor]]
"""[entry of A][patch] -> vector of width D."""


def bisection(scores: list[Tensor], alpha: float) -> list[Tensor]:
    """α-entmax of a list of numbers by 200 halvings; α = 1 is softmax."""
    values = [float(s) for s in scores]
    top = max(values)
    if alpha == 1.0:
        total = sum(math.exp(v - top) for v in values)
        return [torch.tensor(math.exp(v - top) / total, dtype=torch.float64) for v in values]
    a = alpha - 1.0
    low, high = a * top - 1.0, a * top

    def shares(tau: float) -> list[float]:
        return [max(a * v - tau, 0.0) ** (1.0 / a) if a * v > tau else 0.0 for v in values]

    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shares(middle)) > 1.0 else (low, middle)
    return [torch.tensor(p, dtype=torch.float64) for p in shares(low)]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = sum(x) / len(x)
    variance = sum((v - mean) ** 2 for v in x) / len(x)
    return (x - mean) / torch.sqrt(variance + 1e-5) * weight + bias


def gelu(x: Tensor) -> Tensor:
    return torch.stack([v * 0.5 * (1 + math.erf(float(v) / math.sqrt(2))) for v in x])


class Reference:
    """Evaluates one row of a table."""

    def __init__(self, config: Config, state: dict[str, Tensor]) -> None:
        self.config = config
        self.state = {name: tensor.double() for name, tensor in state.items()}
        self.calls: list[tuple[str, dict[tuple[int, int], list[float]]]] = []
        """Of each association in turn its name and, by head and query, its weights."""

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.state[f"{name}.weight"] @ x + self.state[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return layer_norm(x, self.state[f"{name}.weight"], self.state[f"{name}.bias"])

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"{name}.2", gelu(self.linear(f"{name}.0", x)))

    def alpha(self, name: str) -> float:
        if self.config.activation == "entmax":
            raw = float(self.state[f"{name}.activation.raw"])
            return 2.0 - (1.0 - 1e-6) / (1.0 + math.exp(raw))
        return {"sparsemax": 2.0, "softmax": 1.0, "entmax_fixed": 1.5}[self.config.activation]

    def associate(self, name: str, queries: list[Tensor], memories: list[Tensor], project: bool = True) -> list[Tensor]:
        """Z = entmax(β Q Kᵀ) V, then the output projection; lists of vectors in and out."""
        config = self.config
        width = config.d_model // config.n_heads
        asked = [self.linear(f"{name}.query", q) if project else q for q in queries]
        keys = [self.linear(f"{name}.key", m) for m in memories]
        values = [
            self.linear(f"{name}.value", k if config.hopfield_values else m)
            for k, m in zip(keys, memories, strict=True)
        ]
        alpha, found = self.alpha(name), {}
        noted: dict[tuple[int, int], list[float]] = {}
        self.calls.append((name, noted))
        for head in range(config.n_heads):
            part = slice(head * width, (head + 1) * width)
            for index, query in enumerate(asked):
                scores = [sum(query[part] * key[part]) / math.sqrt(width) for key in keys]
                weights = bisection(scores, alpha)
                noted[head, index] = [float(w) for w in weights]
                found[head, index] = sum(w * value[part] for w, value in zip(weights, values, strict=True))
        if config.mix_heads:
            flat = torch.cat([found[h, i] for h in range(config.n_heads) for i in range(len(queries))])
            rows = list(flat.reshape(len(queries), -1))
        else:
            rows = [torch.cat([found[h, i] for h in range(config.n_heads)]) for i in range(len(queries))]
        return [self.linear(f"{name}.output", row) for row in rows]

    def tail(self, name: str, cell: Tensor, found: Tensor) -> Tensor:
        x = self.norm(f"{name}.norm_in", cell + found)
        return self.norm(f"{name}.norm_out", x + self.feed_forward(f"{name}.feed_forward", x))

    def block(self, name: str, x: Cells) -> Cells:
        """Column-wise, then row-wise."""
        column: Cells = []
        for patches in x:
            found = self.associate(f"{name}.column.association", patches, patches)
            column.append([self.tail(f"{name}.column.tail", c, f) for c, f in zip(patches, found, strict=True)])
        out: Cells = [[] for _ in column]
        for p in range(len(column[0])):
            cells = [patches[p] for patches in column]
            prototypes = list(self.state[f"{name}.row.pool.prototypes"][p])
            project = self.config.pool_query_projection
            pooled = self.associate(f"{name}.row.pool.association", prototypes, cells, project)
            found = self.associate(f"{name}.row.association", cells, pooled)
            for index, (cell, f) in enumerate(zip(cells, found, strict=True)):
                out[index].append(self.tail(f"{name}.row.tail", cell, f))
        return out

    def embed(self, x_num: list[float], x_cat: list[int]) -> list[list[Tensor]]:
        """[feature][embedding position] -> number, categorical features first."""
        config, features = self.config, []
        start = 0
        for column, (code, size) in enumerate(zip(x_cat, config.cardinalities, strict=True)):
            own = self.state["categories.weight"][start + code]
            features.append([*own, *self.state["categories.shared"][column]])
            start += size
        for column, x in enumerate(x_num):
            edges, encoded = self.state["numbers.edges"][column], []
            for g in range(1, config.d_embedding + 1):
                low, high = edges[g - 1], edges[g]
                share = (x - low) / (high - low)
                if (g > 1 or not config.extrapolate) and x < low:
                    share = torch.zeros(())
                if (g < config.d_embedding or not config.extrapolate) and x >= high:
                    share = torch.ones(())
                encoded.append(share.double())
            features.append(encoded)
        return features

    def patches(self, axis: list[list[Tensor]]) -> Cells:
        stride = self.config.stride
        cells: Cells = []
        for index, positions in enumerate(axis):
            while len(positions) % stride:
                positions = [positions[0], *positions]  # grows by one more copy of the first position
            row = []
            for p in range(len(positions) // stride):
                patch = torch.stack(positions[p * stride : (p + 1) * stride])
                position = self.state["patches.position"][index, p]
                row.append(self.norm("patches.norm", self.linear("patches.projection", patch) + position))
            cells.append(row)
        return cells

    def merge(self, name: str, patches: list[Tensor]) -> list[Tensor]:
        r = self.config.n_merge
        if len(patches) < r:
            patches = (patches * r)[:r]
        elif len(patches) % r:
            patches = patches + patches[-(r - len(patches) % r) :]
        joined = [torch.cat(patches[i : i + r]) for i in range(0, len(patches), r)]
        return [self.linear(f"{name}.linear", self.norm(f"{name}.norm", j)) for j in joined]

    def encode(self, x: Cells) -> list[Cells]:
        outputs = [x]
        for level in range(self.config.n_encoder_levels):
            name = f"encoder.levels.{level}"
            if level > 0:
                x = [self.merge(f"{name}.merge", patches) for patches in x]
            x = self.block(f"{name}.block", x)
            outputs.append(x)
        return outputs

    def decode(self, encoded: list[Cells]) -> list[Tensor]:
        """One vector of S numbers per entry of A."""
        if not self.config.decoder:
            return [self.linear("decoder.linear", torch.cat(patches)) for patches in encoded[-1]]
        x: Cells = [list(patches) for patches in self.state["decoder.position"]]
        total = [torch.zeros(()) for _ in x]
        for level, memory in enumerate(encoded):
            name = f"decoder.levels.{level}"
            x = self.block(f"{name}.block", x)
            for index, patches in enumerate(x):
                found = self.associate(f"{name}.cross", patches, memory[index])
                middle = [self.norm(f"{name}.norm_in", c + f) for c, f in zip(patches, found, strict=True)]
                x[index] = [
                    self.norm(f"{name}.norm_out", m + self.feed_forward(f"{name}.feed_forward", m)) for m in middle
                ]
                total[index] = total[index] + torch.cat([self.linear(f"{name}.emit", c) for c in x[index]])
        return total

    def __call__(self, x_num: list[float], x_cat: list[int]) -> Tensor:
        """(K,) outputs of one row."""
        features = self.embed(x_num, x_cat)
        if self.config.swap_directions:
            features = [list(position) for position in zip(*features, strict=True)]
        decoded = self.decode(self.encode(self.patches(features)))
        x = torch.stack([row[s] for s in range(len(decoded[0])) for row in decoded])
        for layer in (1, 4, 7):
            x = self.linear(f"head.{layer}", x).clamp(min=0)
        return self.linear("head.9", x)
