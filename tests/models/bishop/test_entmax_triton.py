"""The Triton kernels of α-entmax: the very same source in Triton's interpreter on the CPU, compiled, and on a GPU."""

from __future__ import annotations

import importlib.util
import itertools
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from entmax import entmax_bisect
from torch import Tensor

from bishop_ray.models.bishop import entmax_triton
from bishop_ray.models.bishop.entmax import ALPHA_MIN, entmax

WITH_TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton (Linux)"
)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]

Run = Callable[..., Any]


def _interpret() -> None:
    """Triton reads its switch as it is first imported, so that its interpreter needs a process of its own."""
    assert "triton" not in sys.modules, "importing the package must not import Triton"
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    """Calls a function of `entmax_triton` by its name in a process where kernels are interpreted."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _interpret) as pool:

        def run(name: str, *args: Any) -> Any:
            # Plain arrays: tensors would travel through shared memory files.
            return pool.submit(_call, name, *(_pack(a) for a in args)).result()

        yield lambda name, *args: _unpack(run(name, *args))


def _pack(value: Any) -> Any:
    return (value.dtype, value.detach().float().numpy()) if isinstance(value, Tensor) else value


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_unpack(v) for v in value)
    return torch.from_numpy(np.array(value[1])).to(value[0]) if isinstance(value, tuple) else value


def _call(name: str, *args: Any) -> Any:
    result = getattr(entmax_triton, name)(*(_unpack(a) for a in args))
    return [_pack(r) for r in result] if isinstance(result, tuple) else _pack(result)


def _scores(rows: int, length: int, spread: float, seed: int = 0, ties: bool = False) -> Tensor:
    values = np.random.default_rng(seed).normal(size=(rows, length))
    return torch.tensor((np.round(values * 3) / 3 if ties else values) * spread, dtype=torch.float32)


def _exact(scores: Tensor, alpha: float | Tensor) -> Tensor:
    """100 bisections in float64."""
    value = alpha.double()[:, None] if isinstance(alpha, Tensor) else torch.tensor(alpha).double()
    found: Tensor = entmax_bisect(scores.double(), value, n_iter=100)
    return found


def _check(run: Run, scores: Tensor, alpha: Tensor, atol: float = 3e-6) -> None:
    found = run("forward", scores, alpha)
    each = alpha.expand(len(scores))
    assert found.dtype == scores.dtype
    assert (found >= 0).all()
    assert (found.double() - _exact(scores, each)).abs().max() < atol
    assert (found.sum(-1) - 1).abs().max() < 1e-6


def _gradients(scores: Tensor, alpha: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Probabilities and both gradients of the CPU's function, in float64."""
    s, a = scores.double().requires_grad_(), alpha.double().requires_grad_()
    p = entmax(s, a if a.numel() == 1 else a[:, None])
    return p.detach(), *torch.autograd.grad(p, (s, a), upstream.double())


ALPHAS = [ALPHA_MIN, 1.0001, 1.05, 1.3, 1.5, 1.75, 1.95, 1.999, 2.0]
SPREADS = [1e-3, 0.05, 0.3, 1.0, 10.0, 1e4]


@WITH_TRITON
@pytest.mark.parametrize("length", [1, 2, 4, 10, 41])
def test_forward_equals_bisection(interpreted: Run, length: int) -> None:
    grid = list(itertools.product(ALPHAS, SPREADS, [False, True]))
    rows = 1 if length > 10 else 2
    scores = torch.cat([_scores(rows, length, s, seed=i, ties=t) for i, (_, s, t) in enumerate(grid)])
    alpha = torch.tensor([a for a, _, _ in grid]).repeat_interleave(rows)
    _check(interpreted, scores, alpha)


@WITH_TRITON
@pytest.mark.parametrize("length", [129, 512])
def test_long_rows_equal_bisection(interpreted: Run, length: int) -> None:
    grid = [(1.0 + 1e-5, 0.3), (1.5, 1.0), (1.9, 0.3), (2.0, 0.05), (2.0, 0.3), (1.5, 1e4)]
    scores = torch.cat([_scores(1, length, s, seed=length, ties=i == 4) for i, (_, s) in enumerate(grid)])
    _check(interpreted, scores, torch.tensor([a for a, _ in grid]))


@WITH_TRITON
@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 5, 8, 16, 33, 64, 100, 128, 200, 511, 512])
def test_forward_equals_bisection_on_a_wide_grid(interpreted: Run, length: int) -> None:
    rows = 4 if length < 64 else 1
    generator = np.random.default_rng(length)
    spreads = 10.0 ** generator.uniform(-3, 4, 40)
    scores = torch.cat([_scores(rows, length, s, seed=i, ties=i % 3 == 0) for i, s in enumerate(spreads)])
    alpha = torch.tensor(np.append(generator.uniform(1.0, 2.0, 30) + 1e-6, 1 + 10.0 ** generator.uniform(-6, -1, 10)))
    _check(interpreted, scores, alpha.clamp(max=2.0).float().repeat_interleave(rows))


def _hardest(length: int, kept: float, last: int) -> Tensor:
    """A row where Newton's method at α = 2 drops only a share of the support at each step, down to `last` entries.

    Entries drop out just after the threshold passes them; where it passes is the solution of a linear system.
    """
    support = [length]
    while last <= round(support[-1] * kept) < support[-1]:
        support.append(round(support[-1] * kept))
    steps = len(support) - 1
    dropped = [a - b for a, b in itertools.pairwise(support)]
    system, right = np.zeros((steps + 1, steps + 1)), np.full(steps + 1, 1.0 - support[-1])
    for j in range(steps):
        system[j, j + 1] += support[j]
        system[j, j] -= support[j]
        for i in range(j + 1, steps):
            system[j, j] += dropped[i]
            system[j, i] -= dropped[i]
        system[j, j] += support[-1]
    system[steps], right[steps] = np.eye(steps + 1)[0], 0.0
    passed = np.linalg.solve(system, right)
    values = np.concatenate([np.full(n, -1 - c + 1e-6) for n, c in zip(dropped, passed, strict=False)])
    return torch.tensor(np.append(values, np.zeros(support[-1]))[None], dtype=torch.float32)


@WITH_TRITON
@pytest.mark.parametrize("length", [10, 41, 512])
def test_rows_built_against_the_method_are_solved(interpreted: Run, length: int) -> None:
    # Hundreds of equal entries at the edge round alike, so that their errors add up in the sum.
    atol = max(3e-6, length * 2.0**-25)
    rows = [_hardest(length, kept, last) for kept in (0.5, 0.8) for last in (2, 4)]
    _check(interpreted, torch.cat(rows).repeat_interleave(2, 0), torch.tensor([2.0, 1.99] * len(rows)), atol)


@WITH_TRITON
def test_softmax_limit_keeps_relative_precision(interpreted: Run) -> None:
    scores = _scores(10, 30, 3.0)
    alpha = torch.tensor([ALPHA_MIN])
    expected = entmax(scores.double(), alpha.double())
    assert expected.min() < 1e-6
    assert ((interpreted("forward", scores, alpha).double() - expected) / expected).abs().max() < 5e-6


@WITH_TRITON
def test_ties_stay_equal_and_pairs_stay_ordered(interpreted: Run) -> None:
    gaps = torch.linspace(0, 1.5, 101)
    larger = interpreted("forward", torch.stack([gaps, torch.zeros_like(gaps)], -1), torch.tensor([2.0]))[:, 0]
    assert larger[0] == 0.5
    assert (larger - (0.5 + gaps / 2).clamp(max=1)).abs().max() < 2e-7, "exact: linear at α = 2"
    tied = interpreted("forward", torch.tensor([[1.0, 0.9, 1.0, -5.0, 0.9, 1.0, 1.0]]), torch.tensor([2.0]))[0]
    assert len({*tied[[0, 2, 5, 6]].tolist()}) == 1
    assert tied[3] == 0
    assert tied[1] == tied[4]


@WITH_TRITON
@pytest.mark.parametrize("length", [10, 41])
def test_gradients_equal_those_in_float64(interpreted: Run, length: int) -> None:
    for i, alpha in enumerate([ALPHA_MIN, 1.01, 1.2, 1.5, 1.9, 2.0]):
        scores, upstream = _scores(40, length, 1.5, seed=i), _scores(40, length, 1.0, seed=100 + i)
        one = torch.tensor([alpha])
        p, d_scores, d_alpha = _gradients(scores, one, upstream)
        found = interpreted("backward", p.float(), upstream, one, True)
        # At an edge of the support the derivative is itself large: a float32 probability of 1e-9 says so much of it.
        assert (found[0] - d_scores).abs().max() < 3e-6
        assert found[1].shape == (1,)
        assert abs(float(found[1] - d_alpha)) < 2e-6 * max(1.0, float(upstream.abs().sum()) ** 0.5)


@WITH_TRITON
def test_gradient_of_alpha_per_row(interpreted: Run) -> None:
    alpha = torch.tensor([ALPHA_MIN, 1.0001, 1.001, 1.05, 1.1, 1.25, 1.3, 1.5, 1.7, 1.9, 1.99, 2.0])
    scores, upstream = _scores(12, 17, 2.0), _scores(12, 17, 1.0, seed=1)
    p, d_scores, d_alpha = _gradients(scores, alpha, upstream)
    found = interpreted("backward", interpreted("forward", scores, alpha), upstream, alpha, True)
    assert (found[0] - d_scores).abs().max() < 1e-5
    assert found[1].shape == (12,)
    assert interpreted("backward", p.float(), upstream, torch.tensor(1.5), True)[1].shape == ()
    assert ((found[1] - d_alpha).abs() < 1e-5 + 1e-5 * d_alpha.abs()).all()
    assert interpreted("backward", p.float(), upstream, alpha, False)[1] is None


@WITH_TRITON
@pytest.mark.parametrize("alpha", [ALPHA_MIN, 1.5, 2.0])
def test_rows_that_are_masked_single_or_undefined(interpreted: Run, alpha: float) -> None:
    inf, nan = math.inf, math.nan
    scores = torch.tensor(
        [
            [-inf] * 3,
            [-inf, 3.0, -inf],
            [0.0, nan, 1.0],
            [5.0, 5.0, -inf],
            [1.0, inf, 0.0],
            [nan] * 3,
            [-1e30, 1.0, 0.9],
        ]
    )
    one = torch.tensor([alpha])
    found = interpreted("forward", scores, one)
    torch.testing.assert_close(found, entmax(scores, alpha), equal_nan=True, rtol=0, atol=1e-6)
    assert found[0].tolist() == [0.0] * 3
    assert found[[2, 4, 5]].isnan().all()
    usual = [0, 1, 3, 6]
    d_scores, d_alpha = interpreted("backward", found[usual], torch.tensor([[1.0, 2.0, 4.0]] * 4), one, True)
    assert d_scores.isfinite().all()
    assert d_scores[0].tolist() == [0.0] * 3
    assert d_alpha.isfinite().all()
    assert interpreted("backward", found, torch.ones(7, 3), one, False)[0][2].isnan().all()


@WITH_TRITON
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_solved_in_float32(interpreted: Run, dtype: torch.dtype) -> None:
    scores, upstream, alpha = (
        _scores(30, 10, 1.0).to(dtype),
        _scores(30, 10, 1.0, seed=1).to(dtype),
        torch.tensor([1.4]),
    )
    p = interpreted("forward", scores, alpha)
    torch.testing.assert_close(p, entmax(scores.float(), 1.4).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    d_scores, d_alpha = interpreted("backward", p, upstream, alpha, True)
    _, expected, expected_alpha = _gradients(scores, alpha, upstream)
    assert d_scores.dtype == dtype
    assert (d_scores - expected).abs().max() < 4 * torch.finfo(dtype).eps
    assert abs(float(d_alpha - expected_alpha)) < 30 * torch.finfo(dtype).eps


@WITH_TRITON
def test_a_row_does_not_depend_on_its_neighbours(interpreted: Run) -> None:
    scores, alpha = _scores(50, 10, 0.3), torch.tensor([1.9])
    together = interpreted("forward", scores, alpha)
    assert torch.equal(together[17:18], interpreted("forward", scores[17:18], alpha))
    scores[16] = math.nan
    assert torch.equal(together[17:], interpreted("forward", scores, alpha)[17:])


@WITH_TRITON
def test_what_is_taken(interpreted: Run) -> None:
    for dtype in DTYPES:
        assert interpreted("available", torch.zeros(2, 512).to(dtype))
    for refused in (torch.zeros(2, 513), torch.zeros(0, 3), torch.zeros(3, 0), torch.tensor(1.0)):
        assert not interpreted("available", refused)
    assert not entmax_triton.available(torch.zeros(2, 3)), "not on a CPU outside the interpreter"
    assert not entmax_triton.available(torch.zeros(2, 3, dtype=torch.float64))


def _compile(length: int, dtype: str, capability: int) -> list[tuple[int, str]]:
    """Shared memory and assembly of both kernels, compiled for a GPU that need not be there."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from bishop_ray.models.bishop import entmax_triton_kernels as kernels

    found = []
    for kernel in (kernels.forward_kernel, kernels.backward_kernel):
        _, tile = entmax_triton._shape_of_programs(1000, length)
        constants = {k: v for k, v in tile.items() if k != "num_warps"}
        constants |= {"ALPHA_STRIDE": 0, "STEPS": entmax_triton._steps(length), "NEED_ALPHA": 1}
        names = kernel.arg_names
        # As a launch does it: a length of 1 is a constant, pointers and some lengths are multiples of 16.
        constants |= {"length": 1} if length == 1 else {}
        kinds = {"n_rows": "i32", "length": "i32", "alpha_ptr": "*fp32", "d_alpha_ptr": "*fp32"}
        signature = {n: "constexpr" if n in constants else kinds.get(n, f"*{dtype}") for n in names}
        even = [n for n in names if n.endswith("_ptr") or (n == "length" and length % 16 == 0)]
        source = ASTSource(
            kernel,
            signature,
            {(names.index(n),): v for n, v in constants.items() if n in names},
            {(names.index(n),): [["tt.divisibility", 16]] for n in even},
        )
        compiled = triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": tile["num_warps"]})
        assert compiled.asm["cubin"]
        found.append((compiled.metadata.shared, compiled.asm["ptx"]))
    return found


@WITH_TRITON
@pytest.mark.slow
def test_compiles_for_gpus_without_waiting_between_warps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cases = [(1, "fp32", 90), (4, "bf16", 90), (10, "fp32", 90), (16, "fp16", 75), (41, "bf16", 80), (512, "fp32", 90)]
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        for length, dtype, capability in cases:
            for shared, assembly in pool.submit(_compile, length, dtype, capability).result():
                assert shared == 0, "rows stay in registers"
                assert "bar.sync" not in assembly
                assert ".f64" not in assembly


@WITH_TRITON
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("length", [1, 2, 4, 10, 16, 41, 100, 256, 512])
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(length: int, dtype: torch.dtype) -> None:
    eps = torch.finfo(dtype).eps
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i, (alpha, spread) in enumerate(itertools.product(ALPHAS, SPREADS)):
            scores = _scores(999, length, spread, seed=i, ties=i % 2 == 0).to(dtype)
            upstream = _scores(999, length, 1.0, seed=i + 1).to(dtype)
            one = torch.tensor([alpha])
            inputs = [x.pin_memory().cuda(non_blocking=True) for x in (scores, one, upstream)]
            assert entmax_triton.available(inputs[0])
            p = entmax_triton.forward(inputs[0], inputs[1])
            results = (p, *entmax_triton.backward(p, inputs[2], inputs[1], True))
            again = entmax_triton.backward(p, inputs[2], inputs[1], True)
            assert results[1].dtype == dtype
            torch.cuda.set_sync_debug_mode("default")
            assert torch.equal(results[1], again[0]), "no atomic sums"
            assert torch.equal(results[2], again[1])
            expected = _exact(scores.float(), alpha)
            assert (results[0].cpu() - expected).abs().max() < max(1e-5, eps)
            if dtype == torch.float32:
                # From the very probabilities of the GPU: at an edge of the support rounding decides who is in it.
                p64 = results[0].double().cpu()
                w = torch.where(p64 > 0, p64 ** (2.0 - one.double()), 0.0)
                centred = upstream - (w * upstream).sum(-1, keepdim=True) / w.sum(-1, keepdim=True)
                assert (results[1].cpu() - w * centred).abs().max() < 1e-5
                assert results[2].isfinite().all()
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")


@WITH_TRITON
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_on_a_gpu_in_a_graph_and_per_row() -> None:
    scores, upstream = _scores(10240, 10, 1.0).cuda(), _scores(10240, 10, 1.0, seed=1).cuda()
    alpha = torch.linspace(ALPHA_MIN, 2.0, 10240).cuda()
    p = entmax_triton.forward(scores, alpha)
    d_scores, d_alpha = entmax_triton.backward(p, upstream, alpha, True)
    expected = _gradients(scores.cpu(), alpha.cpu(), upstream.cpu())
    assert (p.cpu() - expected[0]).abs().max() < 1e-5
    assert ((d_alpha.cpu() - expected[2]).abs() < 1e-3 * (1 + expected[2].abs())).double().mean() > 0.99
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = entmax_triton.forward(scores, alpha)
        gradients = entmax_triton.backward(again, upstream, alpha, True)
    scores.copy_(scores.flip(0))
    alpha.copy_(alpha.flip(0))
    graph.replay()
    assert torch.equal(again, p.flip(0))
    assert torch.equal(gradients[1], entmax_triton.backward(again, upstream, alpha, True)[1])
    assert not torch.equal(gradients[0], d_scores)
