"""Memory retrieval: the energy falls, for any patterns, alpha and beta; and the job that measures the theory."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bishop_ray.cli import theory
from bishop_ray.errors import UserError
from bishop_ray.models.bishop.hopfield import energy, retrieve
from bishop_ray.paper.retrieval import (
    BETAS,
    LIMIT,
    Draws,
    energy_rows,
    error_rows,
    fit_rows,
    iteration_rows,
    iterations,
    noise_rows,
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    alpha=st.one_of(st.floats(1.0 + 1e-6, 2.0), st.sampled_from([1.0, 1.5, 2.0])),
    log_beta=st.floats(-3.0, 3.0),
    log_scale=st.floats(-1.5, 1.5),
    patterns=st.integers(1, 40),
    dim=st.integers(1, 24),
    seed=st.integers(0, 10_000),
)
def test_energy_never_rises(
    alpha: float, log_beta: float, log_scale: float, patterns: int, dim: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    beta = 10.0**log_beta
    memory = 10.0**log_scale * torch.randn(patterns, dim, generator=generator, dtype=torch.float64)
    state = 10.0**log_scale * torch.randn(20, dim, generator=generator, dtype=torch.float64)
    before = energy(state, memory, alpha, beta)
    for _ in range(5):
        largest = (state * state).sum(-1)
        state = retrieve(state, memory, alpha, beta)
        after = energy(state, memory, alpha, beta)
        rounding = 1e-12 * (1.0 + before.abs() + largest + (state @ memory.mT).abs().amax(-1) + 1.0 / beta)
        assert bool((after - before <= rounding).all()), float((after - before).max())
        before = after


def test_the_property_would_see_the_printed_forms() -> None:
    rows = energy_rows(Draws.random(60, 8, 6, 1.0, 0))
    assert len(rows) == 5 * len(BETAS)
    assert all(row["rises"] == 0.0 for row in rows)
    assert max(float(row["largest_rise"]) for row in rows) < 1e-12
    assert max(float(row["rises_printed"]) for row in rows if row["beta"] != 1.0) > 0.05
    assert all(row["rises_printed"] == 0.0 for row in rows if row["beta"] == 1.0), "1/beta is then no difference"
    assert max(float(row["rises_printed_entropy"]) for row in rows) > 0.05


def test_the_printed_entropy_is_maximised_by_a_corner_and_the_right_one_by_entmax() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(5, generator=generator, dtype=torch.float64)
    points = torch.distributions.Dirichlet(torch.ones(5, dtype=torch.float64)).sample((4000,))
    points = torch.cat([points, torch.eye(5, dtype=torch.float64)])
    for alpha in (1.3, 1.5, 2.0):
        entropy = (points - points**alpha).sum(-1) / (alpha * (alpha - 1))
        printed = points @ z - entropy
        assert points[printed.argmax()].max() == 1.0
        best = retrieve(z.unsqueeze(0), torch.eye(5, dtype=torch.float64), alpha)[0]  # entmax of z
        own = best @ z + (best - best**alpha).sum() / (alpha * (alpha - 1))
        assert bool((own >= points @ z + entropy - 1e-12).all())


def test_error_rates_are_those_counted_by_hand() -> None:
    draws = Draws.random(40, 5, 4, 1.5, 3)
    row = next(r for r in error_rows(draws, alphas=(2.0,), betas=(3.0,)))
    pairs = anywhere = best = 0
    for memory, query in zip(draws.memory, draws.query[:, 0], strict=True):
        sparse, dense = retrieve(query, memory, 2.0, 3.0), retrieve(query, memory, 1.0, 3.0)
        worse = [bool((sparse - m).norm() > (dense - m).norm() + 1e-10) for m in memory]
        pairs, anywhere = pairs + sum(worse), anywhere + any(worse)
        best += worse[int((memory @ query).argmax())]
    assert row["violated_all"] == pytest.approx(pairs / 200)
    assert row["violated_any"] == pytest.approx(anywhere / 40)
    assert row["violated_best"] == pytest.approx(best / 40)
    assert 0 < pairs < 200


def test_iterations_are_counted_until_rest() -> None:
    draws = Draws.random(20, 6, 8, 0.5, 1)
    count, end = iterations(draws, 1.0, 2.0)
    for n, memory, query, stop in zip(count.tolist(), draws.memory, draws.query, end, strict=True):
        path = [retrieve(query, memory, 1.0, 2.0, steps) for steps in (n - 2, n - 1, n)]
        assert (path[2] - path[1]).norm() <= 1e-6 < (path[1] - path[0]).norm()
        assert torch.allclose(path[2], stop)
    rows = iteration_rows(draws, betas=(2.0, 50.0))
    assert all(1 <= float(row["iterations"]) <= LIMIT for row in rows)
    assert float(rows[-1]["error"]) < 1e-9, "a large beta finds the stored pattern"


def test_noise_curves_start_at_the_clean_pattern_and_rise() -> None:
    rows = noise_rows(60, 8, 16, 10.0, 0)
    for where in ("query", "memory"):
        curve = [float(r["error"]) for r in rows if r["noise_in"] == where and r["alpha"] == 2.0]
        assert curve[0] < 1e-6
        assert curve[-1] > 0.3
    assert all(row["violated"] == 0.0 for row in rows if row["alpha"] == 1.0)
    line = [{"noise_in": "query", "alpha": 2.0, "beta": 1.0, "noise": x, "error": 3 * x + 1} for x in (0.0, 1.0, 2.0)]
    (fit,) = fit_rows(line)
    assert fit["r2_line"] == pytest.approx(1.0)
    assert float(fit["r2_exponential"]) < 0.99


def test_job_writes_every_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--patterns", "4", "--dim", "4", "--draws", "20", "--betas", "0.5", "5", "--output", str(tmp_path / "out")]
    assert theory.run_theory(theory.theory_parser().parse_args(flags)) == 0
    printed = capsys.readouterr().out
    for name, title in theory.TITLES.items():
        assert title in printed
        table = pd.read_csv(tmp_path / "out" / f"{name}.csv")
        assert set(table["patterns"]) == {4}
        assert {0.5, 5.0} == set(table["beta"])


def test_job_refuses_a_file_as_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    args = theory.theory_parser().parse_args(["--output", str(tmp_path / "file")])
    with pytest.raises(UserError, match="--output: expected a folder; found the file"):
        theory.run_theory(args)
