"""BiSHop's dropout, feed-forward part and shared start: the same function as the layers they replace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bishop_ray.data.table import TableSpec, TaskType
from bishop_ray.models.bishop.model import BiSHop
from bishop_ray.models.bishop.ops import Dropout, FeedForward


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.5])
def test_dropout_keeps_the_expectation_and_drops_gradients_alike(rate: float) -> None:
    torch.manual_seed(0)
    x = torch.ones(300, 701, requires_grad=True)
    out = Dropout(rate)(x)
    out.sum().backward()
    level = round(rate * 256) / 256
    assert out.unique().tolist() == pytest.approx([0.0, 1 / (1 - level)])
    assert float((out == 0).float().mean()) == pytest.approx(level, abs=0.005)
    assert torch.equal(x.grad, out.detach())
    rows, columns = (out == 0).float().mean(1), (out == 0).float().mean(0)
    assert rows.std() < 0.03, "no pattern along an axis"
    assert columns.std() < 0.05


def test_dropout_follows_the_global_seed_and_stores_bytes() -> None:
    layer, x = Dropout(0.3), torch.randn(7, 13, requires_grad=True)
    torch.manual_seed(1)
    first = layer(x)
    torch.manual_seed(1)
    assert torch.equal(first, layer(x))
    assert not torch.equal(first, layer(x))
    assert [t.dtype for t in first.grad_fn.saved_tensors] == [torch.uint8]


@pytest.mark.parametrize("rate", [0.0, 0.02, 0.2])
def test_dropout_is_off_in_evaluation_and_takes_any_shape(rate: float) -> None:
    layer = Dropout(rate)
    assert layer(torch.zeros(0, 4)).shape == (0, 4)
    x = torch.randn(3, 5).to(torch.bfloat16).t()
    assert layer(x).dtype == torch.bfloat16
    assert torch.equal(layer.eval()(x), x)


@pytest.mark.parametrize("precise", [True, False])
def test_feed_forward_is_its_three_layers(precise: bool) -> None:
    torch.manual_seed(0)
    part = FeedForward(8, 16)
    results = []
    for function in (part, lambda x: nn.Sequential(*part)(x)):
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=not precise):
            out = function(x)
        part.zero_grad()
        (out.float() * torch.arange(8.0)).sum().backward()
        results.append([out.float(), x.grad, *(p.grad.clone() for p in part.parameters())])
        assert all(p.grad.dtype == torch.float32 for p in part.parameters())
    tolerance = 1e-5 if precise else 3e-2
    for found, expected in zip(*results, strict=True):
        assert (found - expected).abs().max() <= tolerance * expected.abs().max()


def test_feed_forward_does_not_keep_the_activated_values() -> None:
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        FeedForward(8, 16)(torch.randn(5, 8, requires_grad=True))
    assert kept.count((5, 16)) == 1


@pytest.mark.parametrize(("shared", "dropout", "rows"), [(False, 0.2, 6), (True, 0.2, 1), (False, 0.0, 1)])
def test_the_first_decoder_block_sees_one_row_where_it_is_shared(shared: bool, dropout: float, rows: int) -> None:
    sizes = {"d_embedding": 8, "stride": 4, "d_model": 8, "d_ff": 8, "n_heads": 2, "n_encoder_levels": 1}
    spec = TableSpec(TaskType.BINARY, 3, (), 2)
    network = BiSHop(spec, n_decoded=4, n_pool=2, dropout=dropout, shared_start=shared, **sizes).train()
    seen: list[int] = []
    network.decoder.levels[0].block.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    assert network(torch.randn(6, 3), torch.zeros(6, 0, dtype=torch.int64)).shape == (6, 2)
    assert seen == [rows]
