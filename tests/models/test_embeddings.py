"""Quantile edges, piecewise-linear encoding, packed category tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bishop_ray.models.embeddings import CategoryEmbedding, PiecewiseLinear, RepeatedNumber, quantile_edges


def _paper_encoding(x: float, edges: list[float]) -> list[float]:
    """The paper's equation as printed, with a step for a bin without width."""
    n_bins = len(edges) - 1
    encoded = []
    for g in range(1, n_bins + 1):
        low, high = edges[g - 1], edges[g]
        if low == high:
            encoded.append(1.0 if x >= low else 0.0)
        elif x < low and g > 1:
            encoded.append(0.0)
        elif x >= high and g < n_bins:
            encoded.append(1.0)
        else:
            encoded.append((x - low) / (high - low))
    return encoded


def test_edges_are_quantiles_of_the_training_rows() -> None:
    values = np.random.default_rng(0).normal(size=(1000, 3))
    edges = quantile_edges(values, 8)
    assert edges.shape == (3, 9)
    assert edges.dtype == np.float64
    for column in range(3):
        assert edges[column, 0] == values[:, column].min()
        assert edges[column, -1] == values[:, column].max()
        counts, _ = np.histogram(values[:, column], edges[column])
        assert set(counts) <= {124, 125, 126}


def test_edges_of_more_rows_than_torch_quantile_takes() -> None:
    edges = quantile_edges(np.linspace(0, 1, 17_000_000, dtype=np.float32)[:, None], 4)
    assert np.allclose(edges[0], [0, 0.25, 0.5, 0.75, 1.0], atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_edges_refuse_what_has_no_order(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        quantile_edges(np.array([[1.0], [bad]]), 4)
    with pytest.raises(ValueError, match="at least one training row"):
        quantile_edges(np.zeros((0, 2)), 4)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), n_bins=st.integers(1, 9), distinct=st.integers(1, 30))
def test_encoding_is_the_papers_equation(seed: int, n_bins: int, distinct: int) -> None:
    rng = np.random.default_rng(seed)
    pool = rng.normal(size=distinct)
    layer = PiecewiseLinear(1, n_bins).double()
    layer.observe(rng.choice(pool, size=(50, 1)))
    edges = layer.edges[0].tolist()
    points = [*edges, *rng.normal(size=20) * 3]
    found = layer(torch.tensor(points, dtype=torch.float64)[:, None])[:, 0]
    expected = torch.tensor([_paper_encoding(x, edges) for x in points], dtype=torch.float64)
    assert (found - expected).abs().max() < 1e-9 * (1 + expected.abs().max())


def test_ends_go_on_or_stop() -> None:
    train = np.linspace(0, 4, 101)[:, None]
    x = torch.tensor([[-1.0], [6.0]])
    free, bounded = PiecewiseLinear(1, 4), PiecewiseLinear(1, 4, extrapolate=False)
    for layer in (free, bounded):
        layer.observe(train)
    assert torch.allclose(free(x)[:, 0], torch.tensor([[-1.0, 0, 0, 0], [1, 1, 1, 3.0]]), atol=1e-5)
    assert torch.allclose(bounded(x)[:, 0], torch.tensor([[0.0, 0, 0, 0], [1, 1, 1, 1.0]]), atol=1e-5)


def test_columns_do_not_see_each_other_and_no_rows_are_fine() -> None:
    values = np.random.default_rng(1).normal(size=(200, 3)) * [1, 10, 100]
    layer = PiecewiseLinear(3, 5)
    layer.observe(values)
    x = torch.tensor(values[:7], dtype=torch.float32)
    together = layer(x)
    for column in range(3):
        alone = PiecewiseLinear(1, 5)
        alone.observe(values[:, [column]])
        assert torch.equal(together[:, [column]], alone(x[:, [column]]))
    assert layer(torch.zeros(0, 3)).shape == (0, 3, 5)


@pytest.mark.parametrize("value", [0.0, 1e-30, -1e30, 3.4e38, 12345.678])
@pytest.mark.parametrize("extrapolate", [False, True])
def test_constant_and_extreme_columns_stay_finite(value: float, extrapolate: bool) -> None:
    layer = PiecewiseLinear(2, 6, extrapolate)
    train = np.full((50, 2), value, dtype=np.float32)
    train[0, 1] = np.nextafter(np.float32(value), np.float32(0), dtype=np.float32)
    layer.observe(train)
    x = torch.tensor([[value], [value / 2], [-3e38], [3e38], [0.0]], dtype=torch.float32).expand(-1, 2)
    encoded = layer(x)
    assert encoded.isfinite().all()
    assert encoded[0, 0].tolist() == [1.0] * 6
    assert set(encoded[:, 0].unique().tolist()) <= {0.0, 1.0}


def test_edges_travel_with_the_state() -> None:
    layer, other = PiecewiseLinear(2, 4), PiecewiseLinear(2, 4)
    layer.observe(np.random.default_rng(2).normal(size=(99, 2)))
    assert list(layer.state_dict()) == ["edges"]
    other.load_state_dict(layer.state_dict())
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layer(x), other(x))


def test_packed_tables_equal_single_ones() -> None:
    layer = CategoryEmbedding((3, 1, 5), 16, std=1.0)
    codes = torch.tensor([[0, 0, 4], [2, 0, 0], [1, 0, 3]])
    out = layer(codes)
    assert out.shape == (3, 3, 16)
    tables = layer.weight.split([3, 1, 5])
    for column, table in enumerate(tables):
        assert torch.equal(out[:, column, :14], table[codes[:, column]])
        assert torch.equal(out[:, column, 14:], layer.shared[column].expand(3, -1))
    out[:, 2].sum().backward()
    touched = layer.weight.grad.abs().sum(-1) > 0
    assert touched.tolist() == [False] * 4 + [True, False, False, True, True]


def test_plain_and_narrow_tables_have_no_shared_part() -> None:
    assert CategoryEmbedding((3, 4), 16, share_div=0).shared is None
    assert CategoryEmbedding((3, 4), 4).shared is None
    assert CategoryEmbedding((3, 4), 4)(torch.zeros(0, 2, dtype=torch.int64)).shape == (0, 2, 4)


@pytest.mark.parametrize("code", [-1, 3])
def test_a_code_outside_its_table_is_refused(code: int) -> None:
    layer = CategoryEmbedding((3, 4), 8)
    with pytest.raises(IndexError, match=f"categorical column 0: code must be in .*found {code}"):
        layer(torch.tensor([[0, 0], [code, 1]]))


def test_raw_numbers_are_repeated() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(RepeatedNumber(5)(x), torch.stack([x] * 5, dim=-1))
