"""T2G-Former: the learned graph masks attention exactly, and still learns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bishop_ray.config import TrainConfig
from bishop_ray.data.table import TableSpec, TaskType
from bishop_ray.models.t2g_former import GraphAttention, T2GFormer
from bishop_ray.training.optimizer import build_optimizer

SPEC = TableSpec(TaskType.MULTICLASS, 3, (4, 2), 3)
NODES = 6


def layer(n_heads: int = 2, seed: int = 0) -> GraphAttention:
    torch.manual_seed(seed)
    return GraphAttention(NODES, 8, n_heads, 0.0, 1e-2).double()


def nodes(rows: int = 3) -> Tensor:
    return torch.randn(rows, NODES, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def network(**hparams: float) -> T2GFormer:
    torch.manual_seed(1)
    return T2GFormer(SPEC, **{"n_layers": 2, "d_embedding": 16, "n_heads": 4, **hparams})


def batch(rows: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x_cat = torch.stack([torch.randint(n, (rows,), generator=generator) for n in SPEC.cat_cardinalities], 1)
    return torch.randn(rows, SPEC.n_num, generator=generator), x_cat


def test_a_node_hears_exactly_the_nodes_that_its_edges_come_from() -> None:
    attention, x = layer(n_heads=1), nodes().requires_grad_()
    edges = attention.edges()[0]
    assert 4 < int(edges.sum()) < 24, "the topology of this seed has edges on and off"
    out = attention(x, NODES)
    for i in range(NODES):
        heard = torch.autograd.grad(out[:, i].square().sum(), x, retain_graph=True)[0].abs().sum(dim=(0, 2))
        for j in range(NODES):
            if i == j:  # it asks for what it hears, so its own vector matters wherever there is a choice
                assert bool(heard[j] > 0) == (int(edges[i].sum()) > 1)
            else:
                assert bool(heard[j] > 0) == bool(edges[i, j]), (i, j)


def test_edge_that_is_off_passes_nothing_of_any_size() -> None:
    attention, x = layer(n_heads=1), nodes()
    edges = attention.edges()[0]
    i, j = next((i, j) for i in range(NODES) for j in range(1, NODES) if i != j and not edges[i, j])
    changed = x.clone()
    changed[:, j] = 1e3
    before, after = attention(x, NODES), attention(changed, NODES)
    assert torch.equal(before[:, i], after[:, i])
    assert not torch.equal(before, after)


def test_attention_equals_a_loop_over_the_edges() -> None:
    attention, x = layer(), nodes()
    with torch.no_grad():
        attention.relation.normal_(1.0, 0.5)
    edges, ends, values = attention.edges(), attention.ends(x), attention.values(x)
    rows = []
    for b in range(len(x)):
        for i in range(NODES):
            heads = []
            for h in range(2):
                part = slice(4 * h, 4 * h + 4)
                sources = [j for j in range(NODES) if edges[h, i, j]]
                scores = [
                    sum(ends[b, i, part] * attention.relation[h, 0] * ends[b, j, part]) / math.sqrt(4) for j in sources
                ]
                total = sum(s.exp() for s in scores)
                zero = torch.zeros(4, dtype=x.dtype)
                heads.append(
                    sum((s.exp() / total * values[b, j, part] for s, j in zip(scores, sources, strict=True)), zero)
                )
            rows.append(attention.out(torch.cat(heads)))
    slow = torch.stack(rows).view(len(x), NODES, 8)
    torch.testing.assert_close(attention(x, NODES), slow, rtol=0, atol=1e-12)
    torch.testing.assert_close(attention(x, 1), slow[:, :1], rtol=0, atol=1e-12)


def test_edges_are_the_thresholded_cosines() -> None:
    attention = layer()
    with torch.no_grad():
        attention.bias.fill_(-0.2)
    one, other = attention.column_heads, attention.column_tails
    for h in range(2):
        for i in range(NODES):
            for j in range(NODES):
                cosine = one[h, i] @ other[h, j] / (one[h, i].norm() * other[h, j].norm())
                expected = bool(torch.sigmoid(cosine - 0.2) > 0.5) and i != j and j != 0
                assert bool(attention.edges()[h, i, j]) == expected


def test_no_node_without_edges_collects_anything() -> None:
    attention = layer()
    with torch.no_grad():
        attention.bias.fill_(-2.0)
        attention.out.bias.fill_(3.0)
        attention.values.bias.fill_(1.0)
    x = nodes().requires_grad_()
    out = attention(x, NODES)
    assert torch.equal(out, torch.full_like(out, 3.0))
    out.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in attention.parameters() if p.grad is not None)


@pytest.mark.parametrize("seed", range(5))
def test_every_head_of_the_readout_starts_with_an_edge(seed: int) -> None:
    torch.manual_seed(seed)
    assert bool(GraphAttention(2, 8, 8, 0.0, 1e-2).edges()[:, 0].any(dim=-1).all())


def test_the_threshold_passes_gradients_straight_through() -> None:
    """The gradient of the topology is that of the softmax with every existing edge weighted by its probability."""
    attention, x = layer(n_heads=1), nodes()
    target = torch.randn(3, NODES, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    (attention(x, NODES) * target).sum().backward()
    found = [p.grad.clone() for p in (attention.column_heads, attention.column_tails, attention.bias)]
    assert all(float(g.abs().max()) > 0 for g in found)

    def weighted(logits: Tensor) -> Tensor:
        """The layer with edges weighted 1 + logits, by hand."""
        ends, values = attention.ends(x), attention.values(x)
        raw = ((ends * attention.relation[0]) @ ends.transpose(1, 2) / math.sqrt(8)).exp()
        raw = raw * attention.edges()[0] * (1 + logits)
        sums = raw.sum(-1, keepdim=True)
        weights = torch.where(sums > 0, raw / sums.clamp_min(1e-300), 0.0)
        return (attention.out(weights @ values) * target).sum()

    logits = torch.zeros(NODES, NODES, dtype=torch.float64, requires_grad=True)
    slope = torch.autograd.grad(weighted(logits), logits)[0]
    attention.zero_grad()
    (attention.probabilities()[0] * slope).sum().backward()
    for one, parameter in zip(found, (attention.column_heads, attention.column_tails, attention.bias), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-9, atol=1e-12)


def test_training_changes_the_graph() -> None:
    net = network()
    before = [edges.clone() for edges in net.topology()]
    optimizer = build_optimizer(net, TrainConfig(lr=2e-3))
    x_num, x_cat = batch(64)
    y = (x_num[:, 0] > 0).long()
    for _ in range(80):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x_num, x_cat), y)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.3
    assert any(not torch.equal(one, other) for one, other in zip(before, net.topology(), strict=True))
    assert set(net.diagnostics()) == {"edges/1", "edges/2"}


def test_column_embeddings_have_their_own_rate_and_no_decay() -> None:
    net = network(embedding_lr=0.02)
    groups = build_optimizer(net, TrainConfig(lr=1e-4, weight_decay=0.1, optimizer="adamw")).param_groups
    own = {id(p) for b in net.blocks for p in (b.attention.column_heads, b.attention.column_tails)}
    assert {id(p) for group in groups if group["lr"] == 0.02 for p in group["params"]} == own
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert decayed.isdisjoint(own | {id(p) for p in net.tokens.parameters()})
    assert {id(b.expand.weight) for b in net.blocks} <= decayed
    assert groups[0]["lr"] == 1e-4


def test_widths_that_no_head_count_divides_build() -> None:
    net = network(d_embedding=77, n_heads=8).eval()
    assert net.blocks[0].attention.d_head == 9
    assert net(*batch(2)).shape == (2, 3)


def test_rows_of_wide_tables_pass_in_pieces_with_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    net, rows = network(attention_dropout=0.0, ffn_dropout=0.0).double(), batch(9)
    rows = (rows[0].double(), rows[1])
    whole = net(*rows)
    whole.square().sum().backward()
    slopes = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    monkeypatch.setattr("bishop_ray.models.t2g_former._WEIGHTS", 2 * 4 * NODES**2)
    sizes: list[int] = []
    handle = net.tokens.register_forward_hook(lambda _module, inputs, _out: sizes.append(len(inputs[0])))
    with torch.no_grad():
        torch.testing.assert_close(net(*rows), whole, rtol=0, atol=1e-12)
    assert sizes == [2, 2, 2, 2, 1]
    handle.remove()
    net(*rows).square().sum().backward()
    for parameter, slope in zip(net.parameters(), slopes, strict=True):
        torch.testing.assert_close(parameter.grad, slope, rtol=0, atol=1e-10)


def test_unseen_levels_start_without_a_vector_of_their_own() -> None:
    net = network()
    tokens = net.tokens(torch.zeros(1, 3), torch.zeros(1, 2, dtype=torch.int64))
    assert torch.equal(tokens[0, 1:], net.tokens.bias)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_layers", 0),
        ("n_heads", 17),
        ("ffn_factor", 0.01),
        ("embedding_lr", 0.0),
        ("attention_dropout", 1.0),
        ("ffn_dropout", -0.1),
        ("residual_dropout", float("nan")),
    ],
)
def test_impossible_arguments_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{name} must"):
        network(**{name: value})
