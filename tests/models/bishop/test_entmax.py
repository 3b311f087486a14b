"""α-entmax: against a second algorithm, its special cases, finite differences, and what should not break it."""

from __future__ import annotations

import importlib
import math

import numpy as np
import pytest
import torch
from entmax import entmax15, entmax_bisect, sparsemax
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bishop_ray.models.bishop import entmax_torch
from bishop_ray.models.bishop.entmax import ALPHA_MIN, FixedEntmax, LearnedEntmax, Softmax, entmax, make_activation

ALPHAS = [1.0001, 1.05, 1.2, 1.5, 1.75, 1.95, 2.0]


def _scores(*shape: int, spread: float = 1.0, seed: int = 0, ties: bool = False) -> Tensor:
    values = np.random.default_rng(seed).normal(size=shape) * spread
    if ties:
        values = np.round(values * 3) / 3
    return torch.tensor(values, dtype=torch.float64)


@settings(max_examples=150, deadline=None)
@given(
    alpha=st.one_of(st.floats(1.001, 2.0), st.floats(-6, -3).map(lambda e: 1.0 + 10**e), st.just(2.0)),
    length=st.one_of(st.integers(1, 20), st.integers(21, 512)),
    log_spread=st.floats(-3, 4),
    ties=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_equals_bisection_in_float64(alpha: float, length: int, log_spread: float, ties: bool, seed: int) -> None:
    scores = _scores(3, length, spread=10**log_spread, seed=seed, ties=ties)
    found = entmax(scores, alpha)
    expected = entmax_bisect(scores, alpha, n_iter=100)
    # The reference raises numbers to the power 1/(α - 1), which multiplies their rounding.
    assert (found - expected).abs().max() < max(1e-10, 1e-15 / (alpha - 1))
    assert (found.sum(-1) - 1).abs().max() < 1e-12
    assert (found >= 0).all()


def _series(length: int) -> Tensor:
    """Rows whose entries leave the support one after the other, the worst that is known for Newton's method."""
    k = np.arange(length)
    rows = []
    for ratio in (0.3, 0.5, 0.7, 0.9, 0.98, 0.995):
        for size in (1e-3, 0.1, 0.3, 0.8, 1.0, 3.0, 30.0):
            rows += [-size * (1 - ratio**k), -size * ratio**k, -size * k / length, -size * np.sqrt(k / length)]
    return torch.tensor(np.array(rows))


@pytest.mark.parametrize("look", [True, False])
@pytest.mark.parametrize("length", [2, 3, 5, 10, 14, 17, 41, 64, 128, 512])
def test_a_fixed_number_of_evaluations_is_enough(length: int, look: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where no number may be read the count is fixed by the length; elsewhere solving ends as steps become rounding.
    monkeypatch.setattr(entmax_torch, "_may_look", lambda t: look)
    scores = _series(length)
    for alpha in (ALPHA_MIN, 1.01, 1.3, 1.5, 1.75, 1.9, 1.98, 2.0):
        expected = entmax_bisect(scores, alpha, n_iter=100)
        assert (entmax(scores, alpha) - expected).abs().max() < max(1e-11, 1e-15 / (alpha - 1))
        in_float32 = entmax(scores.float(), alpha) - entmax(scores.float().double(), alpha)
        assert in_float32.abs().max() < max(2e-6, length * 2.0**-25), "many tied entries add up their rounding"


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("length", [1, 2, 5, 64, 512])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1e2, 1e4])
def test_float32_is_close_to_float64_of_the_same_scores(alpha: float, length: int, spread: float) -> None:
    scores = _scores(20, length, spread=spread).float()
    found = entmax(scores, alpha)
    assert found.dtype == torch.float32
    assert (found.double() - entmax(scores.double(), alpha)).abs().max() < 3e-6
    assert (found.sum(-1) - 1).abs().max() < 2e-6


def test_special_cases_of_alpha() -> None:
    for spread in (1e-2, 1.0, 30.0):
        scores = _scores(50, 40, spread=spread)
        assert (entmax(scores, 1.5) - entmax15(scores)).abs().max() < 1e-9
        assert (entmax(scores, 2.0) - sparsemax(scores)).abs().max() < 1e-12
        # The distance to softmax is first order in α - 1, with a factor that grows with the square of the scores.
        assert (entmax(scores, ALPHA_MIN) - scores.softmax(-1)).abs().max() < 1e-5


def test_softmax_limit_in_float32_keeps_relative_precision() -> None:
    scores = torch.randn(10, 30, generator=torch.Generator().manual_seed(0))
    expected = scores.double().softmax(-1)
    assert ((entmax(scores, ALPHA_MIN) - expected) / expected).abs().max() < 2e-5


def test_zeros_are_exact_and_grow_with_alpha() -> None:
    scores = _scores(100, 64, spread=2.0)
    zeros = [int((entmax(scores, alpha) == 0).sum()) for alpha in (1.2, 1.5, 1.8, 2.0)]
    assert zeros[0] > 0
    assert zeros == sorted(zeros)
    assert zeros[-1] > zeros[0]


@pytest.mark.parametrize("alpha", ALPHAS)
def test_two_close_scores_stay_ordered(alpha: float) -> None:
    gaps = torch.linspace(0, 2, 2001)
    scores = torch.stack([gaps, torch.zeros_like(gaps)], -1)
    larger = entmax(scores, alpha)[:, 0]
    assert larger[0] == 0.5
    assert (larger.diff() >= -2e-7).all()


@pytest.mark.parametrize("alpha", [1.0 + 1e-4, 1.01, 1.1, 1.3, 1.5, 1.8, 1.99])
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
def test_gradients_of_scores_and_alpha(alpha: float, spread: float) -> None:
    scores = _scores(4, 6, spread=spread, seed=3).requires_grad_()
    value = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
    # Weighted by position: plain sums are constant 1 and would hide wrong gradients.
    weights = torch.arange(6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda s, a: entmax(s, a) * weights, (scores, value), eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("gap", [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.24, 0.26, 0.5, 0.9])
def test_alpha_gradient_against_differences_down_to_the_softmax_limit(gap: float) -> None:
    scores, weights = _scores(30, 12, spread=3.0, seed=1), _scores(12, seed=2)
    alpha = torch.tensor(1.0 + gap, dtype=torch.float64, requires_grad=True)

    def value(a: Tensor) -> Tensor:
        return (entmax(scores, a) * weights).sum()

    (found,) = torch.autograd.grad(value(alpha), alpha)
    step = gap * 1e-3 if gap < 1e-2 else 1e-6
    with torch.no_grad():
        expected = (value(alpha + step) - value(alpha - step)) / (2 * step)
    # Differences lose eps / step; the analytic gradient does not.
    assert abs(float(found - expected)) < 1e-6 * abs(float(expected)) + 1e-13 / step
    in_float32 = torch.tensor(1.0 + gap, requires_grad=True)
    exact = in_float32.detach().double().requires_grad_()
    (entmax(scores.float(), in_float32) * weights.float()).sum().backward()
    value(exact).backward()
    assert abs(float(in_float32.grad - exact.grad)) < 2e-3 * abs(float(exact.grad))


def test_alpha_gradient_at_the_softmax_limit_is_the_known_one() -> None:
    scores, weights = _scores(5, 9, seed=4), _scores(9, seed=5)
    alpha = torch.tensor(ALPHA_MIN, dtype=torch.float64, requires_grad=True)
    (entmax(scores, alpha) * weights).sum().backward()
    p = scores.softmax(-1)
    centred = weights - (p * weights).sum(-1, keepdim=True)
    expected = -(p * p.log() ** 2 * centred).sum() / 2  # the series' first term, as x -> 0
    assert float(alpha.grad) == pytest.approx(float(expected), rel=1e-4)


def test_alpha_per_row_equals_rows_alone() -> None:
    scores = _scores(4, 3, 7).requires_grad_()
    alpha = torch.tensor([1.1, 1.4, 1.7], dtype=torch.float64).reshape(3, 1).requires_grad_()
    together = entmax(scores, alpha)
    assert torch.allclose(together[:, 1], entmax(scores[:, 1], 1.4), rtol=0, atol=1e-15)
    (together * torch.arange(7.0)).sum().backward()
    assert alpha.grad.shape == (3, 1)
    single = torch.tensor(1.4, dtype=torch.float64, requires_grad=True)
    (entmax(scores[:, 1].detach(), single) * torch.arange(7.0)).sum().backward()
    assert float(alpha.grad[1]) == pytest.approx(float(single.grad), rel=1e-9)


def test_expanded_alpha_and_strided_scores() -> None:
    scores = _scores(6, 5, 4).transpose(0, 2)
    alpha = torch.tensor([1.3], dtype=torch.float64).expand(4, 5, 1)
    assert not scores.is_contiguous()
    assert torch.allclose(entmax(scores, alpha), entmax(scores.contiguous(), 1.3), atol=1e-14)
    assert torch.allclose(entmax(scores, 1.3, dim=0), entmax(scores.movedim(0, -1), 1.3).movedim(-1, 0), atol=1e-14)


@pytest.mark.parametrize("alpha", [ALPHA_MIN, 1.5, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_are_masked_single_or_undefined(alpha: float, dtype: torch.dtype) -> None:
    inf, nan = math.inf, math.nan
    scores = torch.tensor([[-inf, -inf, -inf], [-inf, 3.0, -inf], [0.0, nan, 1.0], [5.0, 5.0, -inf]], dtype=dtype)
    scores.requires_grad_()
    value = torch.tensor(alpha, dtype=dtype, requires_grad=True)
    found = entmax(scores, value)
    assert found[0].tolist() == [0.0, 0.0, 0.0]
    assert found[1].tolist() == [0.0, 1.0, 0.0]
    assert found[2].isnan().all()
    assert torch.allclose(found[3], torch.tensor([0.5, 0.5, 0.0], dtype=dtype), atol=1e-6)
    (found[[0, 1, 3]] * torch.tensor([1.0, 2.0, 4.0], dtype=dtype)).sum().backward()
    assert scores.grad[[0, 1, 3]].isfinite().all()
    assert entmax(torch.zeros(4, 1, dtype=dtype), alpha).tolist() == [[1.0]] * 4


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 0, 3)])
def test_empty_input_gives_empty_output_with_gradient(shape: tuple[int, ...]) -> None:
    scores = torch.zeros(shape, requires_grad=True)
    found = entmax(scores, 1.5)
    found.sum().backward()
    assert found.shape == scores.shape
    assert scores.grad.shape == scores.shape


def test_a_nan_row_does_not_stop_the_others() -> None:
    scores = _scores(5, 100)
    expected = entmax(scores, 1.9)
    scores[2, 3] = math.nan
    found = entmax(scores, 1.9)
    assert torch.allclose(found[[0, 1, 3, 4]], expected[[0, 1, 3, 4]], atol=1e-14)


def test_low_precision_is_solved_in_float32() -> None:
    scores = _scores(8, 16).to(torch.bfloat16)
    found = entmax(scores, 1.5)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, entmax(scores.float(), 1.5).to(torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        query = torch.randn(4, 8, requires_grad=True)
        out = entmax(query @ query.mT, torch.tensor(1.5, requires_grad=True))
    out.float().square().sum().backward()
    assert query.grad.isfinite().all()


def test_second_derivative_is_refused() -> None:
    scores = _scores(2, 3).requires_grad_()
    (gradient,) = torch.autograd.grad(entmax(scores, 1.5).square().sum(), scores, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_compiled_equals_eager_in_one_graph() -> None:
    weights = torch.arange(9.0)
    compiled = torch.compile(entmax, backend="aot_eager", fullgraph=True)
    gradients = []
    for function in (compiled, entmax):
        scores = torch.randn(4, 9, generator=torch.Generator().manual_seed(0)).requires_grad_()
        alpha = torch.tensor(1.4, requires_grad=True)
        (function(scores, alpha) * weights).sum().backward()
        gradients.append((scores.grad, alpha.grad))
    torch.testing.assert_close(*gradients)


def test_vmap_equals_a_loop() -> None:
    scores, alphas = _scores(5, 3, 7), torch.tensor([1.0001, 1.2, 1.5, 1.9, 2.0], dtype=torch.float64)

    def total(row: Tensor, alpha: Tensor) -> Tensor:
        return (entmax(row, alpha) * torch.arange(7.0)).square().sum()

    together = torch.vmap(torch.func.grad(total, argnums=(0, 1)))(scores, alphas)
    alone = [torch.func.grad(total, argnums=(0, 1))(*pair) for pair in zip(scores, alphas, strict=True)]
    for found, expected in zip(together, zip(*alone, strict=True), strict=True):
        assert torch.allclose(found, torch.stack(expected), rtol=1e-9, atol=1e-12)


def test_shapes_alone_are_enough_to_trace() -> None:
    scores, alpha = (torch.zeros(s, device="meta", requires_grad=True) for s in ((4, 2, 9), ()))
    entmax(scores, alpha).sum().backward()
    assert scores.grad.shape == (4, 2, 9)
    assert alpha.grad.shape == ()


@pytest.mark.parametrize("alpha", [0.9, 1.0, 2.1, 10.0, -1.0, math.nan])
def test_alpha_outside_its_range_is_refused(alpha: float) -> None:
    for build in (FixedEntmax, LearnedEntmax, lambda a: entmax(torch.zeros(2), a)):
        with pytest.raises(ValueError, match=r"alpha must lie in \(1, 2\].*found"):
            build(alpha)
    with pytest.raises(ValueError, match="must start in"):
        LearnedEntmax(2.0)


@pytest.mark.parametrize("free", [False, True])
def test_learned_alpha_stays_in_range_through_wild_training(free: bool) -> None:
    layer = LearnedEntmax(1.5, free=free)
    assert layer.raw.no_weight_decay is True
    assert layer.alpha == pytest.approx(1.5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=3.0, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    lowest, highest = 2.0, 1.0
    for step in range(3_000):
        sign = 1.0 if (step // 750) % 2 else -1.0
        loss = sign * layer(torch.randn(2, 5, generator=generator)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lowest, highest = min(lowest, layer.alpha), max(highest, layer.alpha)
        assert loss.isfinite()
        assert layer.raw.isfinite()
    assert 1.0 < lowest < 1.4
    assert 1.6 < highest <= 2.0


@pytest.mark.parametrize("raw", [-1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4])
def test_both_ends_of_the_parametrisation_are_finite(raw: float) -> None:
    layer = LearnedEntmax()
    layer.raw.data.fill_(raw)
    scores = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (layer(scores) * torch.arange(8.0)).sum().backward()
    assert 1.0 < layer.alpha <= 2.0
    assert layer.raw.grad.isfinite()
    assert scores.grad.isfinite().all()


def test_activations_by_name() -> None:
    scores = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    assert isinstance(make_activation("entmax"), LearnedEntmax)
    assert torch.equal(make_activation("entmax_fixed", 1.3)(scores), entmax(scores, 1.3))
    assert torch.allclose(make_activation("sparsemax")(scores), sparsemax(scores), atol=1e-6)
    assert torch.equal(make_activation("softmax")(scores), scores.softmax(-1))
    assert [make_activation(n, 1.3).alpha for n in ("entmax_fixed", "sparsemax", "softmax")] == [1.3, 2.0, 1.0]
    assert isinstance(make_activation("softmax"), Softmax)
    with pytest.raises(ValueError, match=r"activation must be one of entmax, .*found 'relu'"):
        make_activation("relu")


@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize("shape", [(40, 7), (3, 2, 5, 33), (6, 1)])
def test_fixed_alpha_by_the_package_equals_our_solver(alpha: float, shape: tuple[int, ...]) -> None:
    weights = _scores(*shape, seed=1)
    for spread in (1e-2, 1.0, 30.0):
        scores = [_scores(*shape, spread=spread).requires_grad_() for _ in range(2)]
        found, own = FixedEntmax(alpha)(scores[0]), entmax(scores[1], alpha)
        assert (found - own).abs().max() < 1e-9
        for p in (found, own):
            (p * weights).sum().backward()
        assert scores[0].grad is not None
        assert scores[1].grad is not None
        assert (scores[0].grad - scores[1].grad).abs().max() < 1e-7


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_fixed_alpha_takes_the_package_only_where_it_is_exact(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object) -> None:
        raise AssertionError("called")

    module = importlib.import_module("bishop_ray.models.bishop.entmax")
    monkeypatch.setattr(module, "entmax", refused)
    FixedEntmax(alpha)(torch.randn(3, 4))
    for scores, other in ((torch.randn(0, 4), alpha), (torch.randn(3, 4), 1.7)):
        with pytest.raises(AssertionError, match="called"):
            FixedEntmax(other)(scores)


@pytest.mark.parametrize("alpha", [1.5, 2.0])
def test_fixed_alpha_of_unusual_rows(alpha: float) -> None:
    inf, nan = math.inf, math.nan
    rows = [[0.0, -inf, 1.0], [-inf] * 3, [1.0, nan, 0.0], [1.0, inf, 0.0], [1e4, -1e30, 9999.9], [nan] * 3]
    scores = torch.tensor(rows).requires_grad_()
    found = FixedEntmax(alpha)(scores)
    torch.testing.assert_close(found, entmax(scores, alpha), equal_nan=True, rtol=0, atol=1e-5)
    found[[0, 4]].square().sum().backward()
    assert scores.grad is not None
    assert torch.isfinite(scores.grad[[0, 1, 4]]).all(), "a bad row spoils no other"
    assert FixedEntmax(alpha)(torch.zeros(2, 0)).shape == (2, 0)


@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fixed_alpha_in_half_precision_is_solved_in_float32(alpha: float, dtype: torch.dtype) -> None:
    scores = torch.randn(50, 20, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    found = FixedEntmax(alpha)(scores)
    assert found.dtype == dtype
    torch.testing.assert_close(found, entmax(scores.float(), alpha).to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    found.square().sum().backward()
    assert scores.grad is not None
    assert scores.grad.dtype == dtype
