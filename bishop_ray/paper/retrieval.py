"""Memory retrieval of modern Hopfield networks, measured on random patterns.

Paper, appendix "Supplementary Theoretical Results": the retrieval-error theorem, its corollaries on faster convergence
and on noise, and the lemma on the falling energy. Every function takes draws and gives rows of plain numbers.

Letters: N draws, S stored patterns, D their width. Everything is float64; patterns have length 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bishop_ray.models.bishop.hopfield import energy, retrieve

RetrievalRow = dict[str, float | str]
DENSE = 1.0
ALPHAS = (1.5, 2.0)
"""The sparse models that are compared with the dense one (α = 1)."""
BETAS = (0.1, 1.0, 10.0, 100.0)
NOISE = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
"""Lengths of the noise, where patterns have length 1."""
ROUNDING = 1e-10
"""Differences up to this are rounding: entmax is solved to some 1e-15."""
TOLERANCE, LIMIT = 1e-6, 500
"""A state has converged when an update moves it by no more; updates that are waited for."""
STEPS = 6
"""Updates along which the energy is looked at."""


@dataclass(frozen=True)
class Draws:
    """Random memories, and a query for each of them.

    Attributes:
        memory: (N, S, D) patterns, uniform on the unit sphere.
        query: (N, 1, D): one of the patterns (`target`) with Gaussian noise, which is as long as asked for on average.
        target: (N,) which pattern.
    """

    memory: Tensor
    query: Tensor
    target: Tensor

    @classmethod
    def random(cls, draws: int, patterns: int, dim: int, noise: float, seed: int) -> Draws:
        """The same for the same arguments."""
        generator = torch.Generator().manual_seed(seed)
        memory = nn.functional.normalize(
            torch.randn(draws, patterns, dim, generator=generator, dtype=torch.float64), dim=-1
        )
        target = torch.randint(patterns, (draws,), generator=generator)
        query = _chosen(memory, target) + noise * _noise((draws, 1, dim), generator)
        return cls(memory, query, target)


def _noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise: Tensor = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
    return noise


def _chosen(memory: Tensor, index: Tensor) -> Tensor:
    """(N, S, D), (N,) -> (N, 1, D)."""
    return memory.gather(1, index.view(-1, 1, 1).expand(-1, 1, memory.shape[-1]))


def _share(flags: Tensor) -> float:
    return float(flags.double().mean())


def energy_rows(
    draws: Draws, alphas: Sequence[float] = (1.0, 1.25, 1.5, 1.75, 2.0), betas: Sequence[float] = BETAS
) -> list[RetrievalRow]:
    """Per α and β: the share of updates at which the energy rises, as it is here and in the two ways it is printed.

    ``rises`` is the energy of `energy`. ``rises_printed`` lacks 1/β before Ψ*; ``rises_printed_entropy`` has 1/β but
    subtracts the entropy Ψ^α as the paper's definition of entmax does (reading Ψ* as its conjugate). ``largest_rise``
    is that of the first one.
    """
    return [_energy_row(draws, alpha, beta) for alpha in alphas for beta in betas]


def _energy_row(draws: Draws, alpha: float, beta: float) -> RetrievalRow:
    state, changes = draws.query, []
    before = _energies(state, draws.memory, alpha, beta)
    for _ in range(STEPS):
        state = retrieve(state, draws.memory, alpha, beta)
        after = _energies(state, draws.memory, alpha, beta)
        changes.append(after - before)
        before = after
    change = torch.stack(changes)  # (steps, 3, N, 1)
    rises = (change > ROUNDING).double().mean((0, 2, 3)).tolist()
    names = ("rises", "rises_printed", "rises_printed_entropy")
    return {
        "alpha": alpha, "beta": beta, **dict(zip(names, rises, strict=True)), "largest_rise": float(change[:, 0].max()),
    }  # fmt: skip


def _energies(state: Tensor, memory: Tensor, alpha: float, beta: float) -> Tensor:
    """(3, N, 1): the energy, without 1/β, with the entropy subtracted."""
    value = energy(state, memory, alpha, beta)
    square = (state * state).sum(-1) / 2
    conjugate = beta * (square - value)  # <p, z> + Ψ^α(p)
    overlap = beta * (retrieve(state, memory, alpha, beta) * state).sum(-1)  # <p, z>, since T(x) = Ξ p
    return torch.stack([value, square - conjugate, square - (2 * overlap - conjugate) / beta])


def error_rows(draws: Draws, alphas: Sequence[float] = ALPHAS, betas: Sequence[float] = BETAS) -> list[RetrievalRow]:
    """Per α and β: how often the theorem ``||T(x) - ξ|| <= ||T_dense(x) - ξ||`` fails after one update, and the errors.

    ``violated_all`` counts pairs of draw and memory, ``violated_any`` draws with at least one such memory (the theorem
    says for all), ``violated_best`` draws whose best-matching memory (largest overlap with the query) is one.
    """
    rows: list[RetrievalRow] = []
    for beta in betas:
        best = (draws.query @ draws.memory.mT).argmax(-1)  # (N, 1)
        dense = _errors(draws, DENSE, beta)  # (N, S)
        for alpha in alphas:
            sparse = _errors(draws, alpha, beta)
            violated = sparse > dense + ROUNDING
            rows.append({
                "alpha": alpha,
                "beta": beta,
                "violated_all": _share(violated),
                "violated_any": _share(violated.any(-1)),
                "violated_best": _share(violated.gather(1, best)),
                "error": float(sparse.mean()),
                "error_dense": float(dense.mean()),
                "error_best": float(sparse.gather(1, best).mean()),
                "error_best_dense": float(dense.gather(1, best).mean()),
            })  # fmt: skip
    return rows


def _errors(draws: Draws, alpha: float, beta: float) -> Tensor:
    """(N, S) distances of the retrieved state from every memory."""
    errors: Tensor = (retrieve(draws.query, draws.memory, alpha, beta) - draws.memory).norm(dim=-1)
    return errors


def iteration_rows(
    draws: Draws, alphas: Sequence[float] = ALPHAS, betas: Sequence[float] = BETAS
) -> list[RetrievalRow]:
    """Per α and β: updates until the state stands still, how often sparse needs more than dense, and where it ends.

    ``iterations`` are means (`LIMIT` where a state has not come to rest, whose share is ``unfinished``); ``violated``
    is the share of draws in which the sparse model needs more of them; ``error`` the distance of the end from the
    target.
    """
    rows: list[RetrievalRow] = []
    for beta in betas:
        dense, dense_end = iterations(draws, DENSE, beta)
        for alpha in alphas:
            count, end = iterations(draws, alpha, beta)
            rows.append({
                "alpha": alpha,
                "beta": beta,
                "iterations": float(count.double().mean()),
                "iterations_dense": float(dense.double().mean()),
                "violated": _share(count > dense),
                "unfinished": _share(count >= LIMIT),
                "unfinished_dense": _share(dense >= LIMIT),
                "error": float((end - _chosen(draws.memory, draws.target)).norm(dim=-1).mean()),
                "error_dense": float((dense_end - _chosen(draws.memory, draws.target)).norm(dim=-1).mean()),
            })  # fmt: skip
    return rows


def iterations(draws: Draws, alpha: float, beta: float) -> tuple[Tensor, Tensor]:
    """(N,) updates until one moves the state by `TOLERANCE` at most, `LIMIT` if none does; (N, 1, D) where it ends."""
    state, end = draws.query, draws.query.clone()
    count = torch.full((len(state),), LIMIT)
    memory, left = draws.memory, torch.arange(len(state))
    for step in range(1, LIMIT):
        following = retrieve(state, memory, alpha, beta)
        rest = (following - state).norm(dim=-1)[:, 0] <= TOLERANCE
        end[left] = following
        count[left[rest]] = step
        state, memory, left = following[~rest], memory[~rest], left[~rest]
        if not len(left):
            break
    return count, end


def noise_rows(
    draws: int, patterns: int, dim: int, beta: float, seed: int, alphas: Sequence[float] = (DENSE, *ALPHAS)
) -> list[RetrievalRow]:
    """Per place of the noise, length of it, and α: the mean distance of the retrieved state from the clean pattern.

    Noise in the query, or in all stored patterns (the query is then clean). ``violated`` is the share of draws in which
    the model is farther off than the dense one.
    """
    clean = Draws.random(draws, patterns, dim, 0.0, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    goal = _chosen(clean.memory, clean.target)
    on_query, on_memory = _noise(tuple(clean.query.shape), generator), _noise(tuple(clean.memory.shape), generator)
    rows: list[RetrievalRow] = []
    for where in ("query", "memory"):
        for length in NOISE:
            query = clean.query + length * on_query if where == "query" else clean.query
            memory = clean.memory + length * on_memory if where == "memory" else clean.memory
            dense = (retrieve(query, memory, DENSE, beta) - goal).norm(dim=-1)
            for alpha in alphas:
                error = (retrieve(query, memory, alpha, beta) - goal).norm(dim=-1)
                rows.append({
                    "noise_in": where,
                    "noise": length,
                    "alpha": alpha,
                    "beta": beta,
                    "error": float(error.mean()),
                    "violated": _share(error > dense + ROUNDING),
                })  # fmt: skip
    return rows


def fit_rows(noise: Sequence[RetrievalRow]) -> list[RetrievalRow]:
    """How straight each noise curve is: R² of a line through the error, and through its logarithm (an exponential)."""
    curves: dict[tuple[str, float, float], list[RetrievalRow]] = {}
    for row in noise:
        curves.setdefault((str(row["noise_in"]), float(row["alpha"]), float(row["beta"])), []).append(row)
    rows: list[RetrievalRow] = []
    for (where, alpha, beta), points in curves.items():
        x = torch.tensor([float(p["noise"]) for p in points], dtype=torch.float64)
        y = torch.tensor([float(p["error"]) for p in points], dtype=torch.float64)
        fits = {"r2_line": _r2_of_line(x, y), "r2_exponential": _r2_of_line(x[y > 0], y[y > 0].log())}
        rows.append({"noise_in": where, "alpha": alpha, "beta": beta, **fits})
    return rows


def _r2_of_line(x: Tensor, y: Tensor) -> float:
    """Squared correlation; NaN without spread."""
    a, b = x - x.mean(), y - y.mean()
    return float((a @ b) ** 2 / ((a @ a) * (b @ b)))
